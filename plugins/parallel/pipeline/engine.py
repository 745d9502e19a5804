"""Runs micro batches through the stages of this rank, with torch's schedules."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from titan.contracts import Batch, BuildContext, ModelPart
from titan.errors import PluginError

from .stages import shared_names


class Pipeline:
    """The engine: a schedule of torch's over this rank's stages (see `contracts.Engine`)."""

    def __init__(
        self, parts: Sequence[ModelPart], context: BuildContext, schedule: str, placement: Sequence[int]
    ) -> None:
        self.parts, self._at = parts, {part.stage: part for part in parts}
        self.context, self.schedule, self.placement = context, schedule, placement
        self.group, self.last = context.mesh.group("pp"), len(placement) - 1
        self._unhooked = [part for part in parts if part.stage < self.last]
        self._running: tuple[tuple[int, torch.Size], Any] | None = None

    def forward_backward(self, batches: Sequence[Batch]) -> None:
        """Add the gradients of all micro batches."""
        self._hook()
        key = len(batches), batches[0].tokens.shape
        if self._running is None or self._running[0] != key:
            self._running = key, self._build(*key)
        tokens = [torch.cat([batch.tokens for batch in batches])] if 0 in self._at else []
        labels = torch.cat([batch.labels for batch in batches])
        more = {"positions": torch.cat([batch.positions for batch in batches]), "labels": labels}
        inputs = [self.parts[0].inputs(batch) for batch in batches]
        more |= {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}
        self._running[1].step(*tokens, target=labels, return_outputs=False, **more)

    @torch.no_grad()
    def forward(self, batch: Batch, labels: Tensor | None = None) -> Tensor | None:
        """Logits or reported loss of a micro batch on the rank of the last stage: one stage after the other."""
        self._hook()
        here = dist.get_rank(self.group)
        x = batch.tokens
        for stage, part in self._at.items():
            if stage and self.placement[stage - 1] != here:
                x = self._hidden(batch.tokens.shape, self.context.device)
                dist.recv(x, group=self.group, group_src=self.placement[stage - 1])
            x = part.forward(x, batch, labels if stage == self.last else None)
            if stage < self.last and self.placement[stage + 1] != here:
                dist.send(x.contiguous(), group=self.group, group_dst=self.placement[stage + 1])
        return x if self.last in self._at else None

    def _build(self, micro_batches: int, shape: torch.Size) -> Any:
        stages = [self._stage(part, shape) for part in self.parts]
        kind = get_schedule_class(self.schedule)
        held = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        # The last stage returns the objective itself, divided by the step's tokens already.
        return kind(held, n_microbatches=micro_batches, loss_fn=lambda objective, _: objective, scale_grads=False)

    def _stage(self, part: ModelPart, shape: torch.Size) -> PipelineStage:
        """Shapes are given: torch would else find them by a run of its own, whose loss would be counted."""
        meta = torch.device("meta")
        hidden = self._hidden(shape, meta).requires_grad_()
        objective = torch.empty((), device=meta).requires_grad_()
        return _Stage(
            part.runner,
            part.stage,
            part.stages,
            self.context.device,
            input_args=torch.empty(shape, dtype=torch.int64, device=meta) if part.stage == 0 else hidden,
            output_args=objective if part.stage == self.last else hidden,
            group=self.group,
        )

    def _hidden(self, shape: torch.Size, device: torch.device) -> Tensor:
        """A buffer for the hidden states between stages, of tokens of this shape [B, S]."""
        split = self.parts[0].hidden_split
        size = (shape[0], shape[1] // split, self.context.spec.dim)
        return torch.empty(size, dtype=self.context.precision.param_dtype, device=device)

    def _hook(self) -> None:
        while self._unhooked:  # in the first step: later phases than this engine's may set another runner
            self._unhooked.pop().runner.register_forward_hook(self._check_hidden)

    def _check_hidden(self, runner: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """A buffer of another size or type at the other end would be a hang, or noise."""
        x = args[0]
        shape = x.shape if x.is_floating_point() else self._hidden(x.shape, torch.device("meta")).shape
        if output.shape != shape or output.dtype != self.context.precision.param_dtype:
            raise PluginError(
                f"the model gave hidden states {list(output.shape)} {output.dtype} between stages, but its spec and "
                f"the precision require {list(shape)} {self.context.precision.param_dtype}"
            )


class _Stage(PipelineStage):
    """A stage that sums gradients in the dtype of reduction also where the backward pass is split."""

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the weights' gradients of a micro batch, and add them to those of the others.

        Torch leaves them in the dtype of the parameters and would add the next ones to them there. What FSDP does at
        the end of a whole backward pass, and torch calls at the end of a step, moves them into the sum.

        Torch 2.15 has FSDP's parameters ask for the dtype of the sum, and would cast each gradient before it is added.
        """
        summed = {
            parameter: parameter.grad_dtype for parameter in self.submod.parameters() if parameter.grad is not None
        }
        for parameter in summed:
            parameter.grad_dtype = None
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        for parameter, dtype in summed.items():
            parameter.grad_dtype = dtype
        if isinstance(self.submod, FSDPModule):
            self.submod._get_fsdp_state()._root_post_backward_final_callback()
            return
        for parameter in self.submod.parameters():
            # A whole backward would lay it out as the parameter; fused optimizers read both as they lie in memory.
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


class TiedGradients:
    """Adds the gradients of tensors that both ends of the pipeline hold, so that their copies step alike."""

    def __init__(self, parts: Sequence[ModelPart], context: BuildContext, placement: Sequence[int]) -> None:
        self.group, self.first, self.last = context.mesh.group("pp"), placement[0], placement[-1]
        self.ends = [part.module for part in parts if part.stage in (0, part.stages - 1)]
        self.names = sorted(shared_names(context.spec))

    @torch.no_grad()
    def add(self) -> None:
        """Add them up, in place; a gradient of one stage alone is left."""
        for name in self.names if self.ends else ():
            gradients = [_local(dict(module.named_parameters())[name].grad) for module in self.ends]
            if self.first == self.last:
                total = gradients[0] + gradients[1]
                for gradient in gradients:
                    gradient.copy_(total)
            elif gradients[0].numel():
                self._exchange(gradients[0])

    def _exchange(self, gradient: Tensor) -> None:
        # The last stage sends its gradient and is sent the sum: both then hold the same bits.
        other = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        if dist.get_rank(self.group) == self.first:
            dist.recv(other, group=self.group, group_src=self.last)
            gradient.add_(other)
            dist.send(gradient.contiguous(), group=self.group, group_dst=self.last)
        else:
            dist.send(gradient.contiguous(), group=self.group, group_dst=self.first)
            dist.recv(other, group=self.group, group_src=self.first)
            gradient.copy_(other)


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "a tied tensor has no gradient on one of its stages"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
