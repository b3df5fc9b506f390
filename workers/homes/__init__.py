"""The care of homes of every role: create them, replace keys, verify and copy journals, remove leftovers."""
