"""Upgrades of journals of earlier versions, one step after another, with the chain of the ledger untouched.

    v1_to_v2    answers remember their recipients, numbers of messages are kept per key
    v2_to_v3    rounds that were asked before shares were noted count as having passed shares on
    v3_to_v4    entries of a ledger may say that an answer was stored

A step is a module that says what it changes and why the chain stays valid; it is frozen when its version is out, and
describes tables as they were then. `runner` verifies the ledger, has a backup made, takes the steps, each in a
transaction of its own, and verifies the ledger again before each is committed. `rebuild` makes a table of SQLite anew
with its rows, indexes and rules, and replaces rules on either database.
"""
