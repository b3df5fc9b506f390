"""What is private, and why: pure code with no file, clock, network or GPU; randomness is an argument."""
