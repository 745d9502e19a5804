"""A library of layers that models share: attention, blocks, decoder, experts, random numbers, and their costs."""
