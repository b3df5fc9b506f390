"""Rivals of the voting methods at the same price, on the same features and, where they vote, the same neighbors."""
