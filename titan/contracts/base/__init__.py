"""The data that host and plugins speak in."""
