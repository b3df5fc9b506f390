"""Images to features: as a command, and as a process in the domain of the coordinator."""
