"""titan: a PyTorch-native trainer for large language models. Start at docs/design.md."""

__version__ = "0.1.0"
