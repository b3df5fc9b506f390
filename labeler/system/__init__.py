"""The operating system's side of the service: clock, durable files, keys, processes. Nothing above is known here."""
