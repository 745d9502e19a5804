"""All layouts of a job, and the best of them."""
