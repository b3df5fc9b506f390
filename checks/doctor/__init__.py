"""Checks whether this machine is ready and right: `checkup` runs steps, each in a process; other modules hold them."""
