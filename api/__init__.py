"""The coordinator over HTTP. Empty for now: the service moves the objects of `workers` into processes behind it."""
