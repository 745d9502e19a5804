"""What a cluster can do: devices, kernels, network."""
