"""Routes: each parses a request, calls the coordinator, renders what it says."""
