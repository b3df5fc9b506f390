"""A whole service on this machine, under load and under attack."""
