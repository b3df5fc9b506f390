"""The durable journal: what was charged, asked, answered and released. The only door of SQL."""
