"""Cost against size: many agents in one round, many records in one search."""
