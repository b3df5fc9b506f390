"""A tallier: keeps one secret share of every ballot of a round, and adds them up once."""
