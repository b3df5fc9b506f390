"""Finding the winner of every query among three talliers, so that nothing but the winner is opened.

engine        what a job is, and what an engine promises
reference     the twin: puts the sums together and looks
child         the MPyC engine at a tallier: one process per job, ended for certain
party         what that process does: limits, pipe, connections, answer
links         connections to the two other talliers: pinned certificates, equal jobs, words and nothing else
certificates  a tallier's own certificate, and whose it trusts
mpyc_party    the secure computation, and the only module that imports MPyC
"""
