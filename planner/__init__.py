"""The planner: predicts memory, step time and cost of a job from its TOML and a cluster file."""
