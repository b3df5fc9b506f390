"""The durable journal of charges, jobs, rounds, answers and releases. The only door of SQL."""
