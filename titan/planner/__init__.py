"""What a run needs and how fast it will be, from its TOML and a description of the cluster."""
