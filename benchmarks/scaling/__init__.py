"""`labeler bench scale`: what grows with images, records, agents, queries and jobs, how fast, and what limits it."""
