"""Stands for a process that chooses and does not end: it bounds itself as the real one does, to a second."""

import resource

resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
while True:
    pass
