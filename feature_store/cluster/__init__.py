"""One party's work on many processors or machines, by Ray: images embedded, and records searched, part by part.

Always inside one party's walls. Parties meet through the coordinator's mail alone, never through a cluster; whoever may
use a cluster may run what it likes on it, so it is the party's own, like its disk.
"""
