"""How agents learn: small networks, many of them trained at once, and fitting them to the requester's images."""
