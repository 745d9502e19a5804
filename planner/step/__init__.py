"""What a step takes: work, schedule, memory, and the prediction from them."""
