"""An agent: one organisation that answers with its private records, in a `run` and as a process of its own."""
