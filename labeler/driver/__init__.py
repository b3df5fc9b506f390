"""The coordinator's driver, which carries out the effects of `labeler.rounds` many at a time, and its mail."""
