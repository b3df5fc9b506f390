"""Cost against size: very many agents in one round, very many records in one search."""
