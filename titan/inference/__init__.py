"""Loading a trained model, generating text with it, and evaluating it."""
