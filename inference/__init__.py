"""What is done with trained weights: generating text, evaluation, and conversion."""
