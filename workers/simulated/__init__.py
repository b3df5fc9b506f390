"""Very many agents in one process tree: `labeler simulate`. Real ballots, noise and shares; no network, nobody else."""
