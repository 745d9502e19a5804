"""AdamW whose update of weights in bf16 is one kernel per parameter with the rounding of all that it stores."""

from typing import Any

import torch
from torch import Tensor

from titan.contracts import optimizers, shard_of
from titan.contracts.optimizers import Streams


class AdamW(optimizers.AdamW):
    """The optimizer of the contracts, with `step_rounded` (`Optimizer.rounds`)."""

    @torch.no_grad()
    def step_rounded(self, streams: Streams, compensation: str) -> None:
        """The update of narrow weights. State is made as `step()` makes it, in the dtype of the parameter."""
        skipped: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            _, gradients, means, squares, _, steps = lists
            if not steps:
                continue
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            torch._foreach_add_(steps, 1)
            if skipped is not None:
                torch._foreach_sub_(steps, [skipped] * len(steps))
            rates = _rates(steps, group)
            for number, parameter in enumerate(parameters):
                state = self.state[parameter]
                if compensation and compensation not in state:
                    state[compensation] = torch.zeros_like(parameter)
                lost = shard_of(state[compensation]) if compensation else None
                if parameter.device.type != "meta":  # a dry run's
                    from .kernel import update  # here: triton is there only where there are GPUs

                    tensors = (gradients[number], means[number], squares[number], lost)
                    update(parameter, *tensors, rates[number], skipped, group, streams(parameter))


def _rates(steps: list[Tensor], group: dict[str, Any]) -> Tensor:
    """[parameters, 2] of the updates with these numbers: lr / (1 - b1^t), and the root of 1 - b2^t.

    In float64 on the device, where the counts are: small differences from 1 keep their digits.
    """
    (b1, b2), times = group["betas"], torch.stack(steps).double()
    return torch.stack([float(group["lr"]) / (1 - b1**times), (1 - b2**times).sqrt()], -1).float()
