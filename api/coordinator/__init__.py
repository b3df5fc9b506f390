"""The coordinator's decisions: tasks, prices, jobs, rounds and budgets. No HTTP in it, and no private data."""
