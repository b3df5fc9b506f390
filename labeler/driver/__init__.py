"""The coordinator's driver, which carries out many effects of `labeler.rounds` at a time, and its mail."""
