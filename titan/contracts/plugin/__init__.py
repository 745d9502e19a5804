"""What every kind of plugin shares: options, the registry, and the check against the contract."""
