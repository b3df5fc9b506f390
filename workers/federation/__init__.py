"""A whole federation on one machine: its home, its processes, and whoever starts and stops them."""
