"""A trained model opened, continued, measured."""
