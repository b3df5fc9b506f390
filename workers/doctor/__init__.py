"""Whether this machine is ready, and right: every step in a process of its own, so that what crashes or hangs becomes a
sentence. `steps` lists them, `alone` runs one, `checkup` all."""
