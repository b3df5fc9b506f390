"""Whether this machine is ready, and right: `checkup` runs steps, each in a process; the other modules hold them."""
