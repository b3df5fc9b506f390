"""One party's work on many processors or machines, by Ray: images embedded, and records searched, part by part.

Always inside one party's walls. Parties meet through the coordinator's mail alone, never through a cluster. A user of a
cluster may run anything on it, so it is the party's own, like its disk.
"""
