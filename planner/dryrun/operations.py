"""Operations to which PyTorch gives no public name, found by calling the public function that runs them."""

import torch

from titan.layers.products import operations_of

_ONE = torch.zeros(1, device="cpu")

(ITEM,) = operations_of(_ONE.item)
"""A value read by the host."""

(CAST,) = operations_of(_ONE.double)
"""A copy of another dtype."""
