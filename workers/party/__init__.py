"""Shared parts of agents and talliers: a home, a link to the coordinator, mail that is signed and taken once."""
