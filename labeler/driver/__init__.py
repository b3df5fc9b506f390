"""Drivers of the machines in `labeler.rounds`: they carry out effects, many at a time, and decide nothing."""
