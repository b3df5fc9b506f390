"""Training of agents' models: small networks, many at once, and their fit to the requester's images."""
