"""The measured search for a layout (`titan tune`): results so far, next proposal, trial runs."""
