"""An agent: one organization that answers with its private records, in a `run` and as a separate process."""
