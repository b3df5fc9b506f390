"""What agents and talliers share: a home, a link to the coordinator, mail that is signed and taken once."""
