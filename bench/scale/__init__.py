"""What a job of thousands of ranks asks of its machine, counted at a small scale, with the formula for a large one."""
