"""What runs: agents, rounds, jobs, students, reports, benches, and the command line that wires them."""
