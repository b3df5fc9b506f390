"""Clock, durable files, keys and processes. Imports nothing from the packages above it."""
