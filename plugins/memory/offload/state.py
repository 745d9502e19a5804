"""Optimizer state in the host's memory: each update brings it to the device and back, a few parameters at a time.

Three buffers' worth of it are on the device: what comes, what is updated, and what goes back. They are allocated after
the backward pass, in memory that activations have left.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan.contracts import groups_of, host_like, locals_of, on_host, only, with_inner, with_switches
from titan.plugins.memory.offload.link import Way

Slots = dict[tuple[nn.Parameter, str], Tensor]


def streamed(optimizer: torch.optim.Optimizer, buffer_bytes: float) -> torch.optim.Optimizer:
    """The optimizer with its state in the host's memory.

    Its class has the name of the wrapped one's, by which a checkpoint tells whose state it holds: the state is the
    same with offloading and without.
    """
    kind = _StreamedSwitching if hasattr(optimizer, "eval") else _Streamed
    made: torch.optim.Optimizer = type(type(optimizer).__name__, (kind,), {})(optimizer, buffer_bytes)
    return made


def in_place(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of parameters that are on the host, which asks on the host whether an update is to be skipped."""
    return with_switches(type(type(optimizer).__name__, (_Wrapper,), {})(optimizer), optimizer)


class _Wrapper(torch.optim.Optimizer):
    """Steps the wrapped optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class _Streamed(_Wrapper):
    """Steps the wrapped optimizer for one bucket of parameters after the other.

    state: between updates on the host, but for scalars such as counts of steps, which stay where they are.
    _going: what goes back to the host: (parameters, what must be kept until it is there, what to wait for).
    """

    def __init__(self, inner: torch.optim.Optimizer, buffer_bytes: float) -> None:
        super().__init__(inner)
        self._buffer_bytes = buffer_bytes
        self._device = next(locals_of(self.param_groups[0]["params"][0])).device
        self._in, self._out = Way(self._device), Way(self._device)
        self._going: deque[tuple[list[nn.Parameter], list[Tensor], Any]] = deque()
        self._count = len(self._parameters())

    def state_like(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor of the host, for state that a checkpoint has of a parameter."""
        return host_like(torch.empty_like(parameter, dtype=dtype))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does to weights and state what the wrapped one's step does; state without a gradient stays where it is.

        While it has but some of its parameters (`update_some`), the host does not wait for what goes back: others'
        backward would wait too. The step of all of them, which ends each update, does.
        """
        everything = self._parameters()
        self._for_each_bucket(self.inner.step, [parameter for parameter in everything if parameter.grad is not None])
        if len(everything) == self._count:
            self._finish()

    def _parameters(self) -> list[nn.Parameter]:
        """Those that it has now, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _finish(self) -> None:
        """Wait on the host until all state is there."""
        self._out.finish()
        self._going.clear()

    def _wait(self, most: int) -> None:
        """Let the device wait for what goes to the host until at most so many buckets are on their way."""
        while len(self._going) > most:
            self._out.wait(self._going.popleft()[2])

    @torch.no_grad()
    def _for_each_bucket(self, work: Callable[[], object], parameters: Sequence[nn.Parameter]) -> None:
        """Let the wrapped one work on the parameters of one bucket after the other, with their state on the device."""
        buckets, groups = list(self._buckets(parameters)), groups_of(self.inner)
        wanted = {id(parameter) for parameter in parameters}
        if any(id(parameter) in wanted for left, _, _ in self._going for parameter in left):
            self._wait(0)
        coming = self._fetch(buckets[0]) if buckets else None
        for number, bucket in enumerate(buckets):
            self._wait(1)
            assert coming is not None
            here, hosts, copied = coming
            self._in.wait(copied)
            if number + 1 < len(buckets):
                coming = self._fetch(buckets[number + 1])
            for (parameter, slot), tensor in here.items():
                self.state[parameter][slot] = tensor
            with only(self.inner, bucket, groups):
                work()
            self._going.append((bucket, *self._store(bucket, hosts)))

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Parameters in order, with state of at most a buffer each, or one parameter."""
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            own = self._size(parameter)
            if bucket and size + own > self._buffer_bytes:
                yield bucket
                bucket, size = [], 0
            bucket, size = [*bucket, parameter], size + own
        if bucket:
            yield bucket

    def _size(self, parameter: nn.Parameter) -> int:
        """Bytes of a parameter's state here; as of two numbers of its dtype where there is none yet."""
        state = [value for value in self.state.get(parameter, {}).values() if isinstance(value, Tensor)]
        return sum(plain.nbytes for value in state or [parameter, parameter] for plain in locals_of(value))

    def _fetch(self, bucket: Sequence[nn.Parameter]) -> tuple[Slots, Slots, Any]:
        """Begin to fetch what the host holds of their state: (on the device, on the host, what to wait for)."""
        hosts = {
            (parameter, slot): value
            for parameter in bucket
            for slot, value in self.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and on_host(value)
        }
        like_here = partial(torch.empty_like, device=self._device, pin_memory=False)
        here = {key: with_inner(value, like_here) for key, value in hosts.items()}
        copied = self._in.copy([pair for key, value in hosts.items() for pair in _pairs(here[key], value)])
        return here, hosts, copied

    def _store(self, bucket: Sequence[nn.Parameter], hosts: Slots) -> tuple[list[Tensor], Any]:
        """Put the state of these parameters on the host; returns what must be kept until a copy, and that copy."""
        leaving, pairs = [], []
        for parameter in bucket:
            for slot, value in self.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or not value.ndim or on_host(value):
                    continue
                host = hosts.get((parameter, slot))
                if host is None or _shapes(host) != _shapes(value):
                    host = host_like(value)
                self.state[parameter][slot] = host
                leaving.append(value)
                pairs += _pairs(host, value)
        return leaving, self._out.copy(pairs)


class _StreamedSwitching(_Streamed):
    """The same where the wrapped one has other weights for evaluation than those it trains."""

    def eval(self) -> None:
        """Weights for evaluation."""
        self._for_each_bucket(self.inner.eval, self._parameters())  # type: ignore[attr-defined]
        self._finish()

    def train(self) -> None:
        """The weights that are trained."""
        self._for_each_bucket(self.inner.train, self._parameters())  # type: ignore[attr-defined]
        self._finish()


def _shapes(tensor: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    return [(plain.shape, plain.dtype) for plain in locals_of(tensor)]


def _pairs(to: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(locals_of(to), locals_of(source), strict=True))
