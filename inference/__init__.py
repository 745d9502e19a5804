"""What is done with weights that runs have left: text from them, evaluation, conversion, and their checkpoints."""
