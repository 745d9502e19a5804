"""The machine model: cluster files, time of kernels, time of collectives."""
