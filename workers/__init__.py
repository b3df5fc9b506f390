"""Processes and commands: agents, talliers, the embedder, `labeler run`, `labeler up`, and the command line."""
