"""What each rank of the pipeline runs, in order: the schedules of PyTorch 2.13, without PyTorch.

The lists are those that `torch.distributed.pipelining.schedules` makes or runs, kind by kind and micro batch by micro
batch, so that a step can be simulated long before there are ranks. Sending and receiving is not in them.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Literal

from titan.contracts.base.cost import Action, Order

Kind = Literal["F", "B", "I", "W"]


def order(schedule: str, ranks: int, stages: int, micro_batches: int) -> Order:
    """The actions of each rank for a step of so many micro batches.

    An overlapped forward and backward of DualPipeV are two actions, the forward first.
    """
    each = stages // ranks
    return [_of_rank(schedule, rank, ranks, each, micro_batches) for rank in range(ranks)]


def _of_rank(schedule: str, rank: int, ranks: int, each: int, micro_batches: int) -> list[Action]:
    if schedule == "1F1B":
        return _one_forward_one_backward(rank, ranks, micro_batches)
    if schedule == "GPipe":
        return [Action(kind, rank, i) for kind in _KINDS for i in range(micro_batches)]
    if schedule == "LoopedBFS":
        return _breadth_first(range(rank, ranks * each, ranks), micro_batches)
    if schedule == "ZBVZeroBubble":
        return _zero_bubble_v(rank, ranks, micro_batches)
    if schedule == "DualPipeV":
        return _DualPipeV(rank, ranks, micro_batches).actions
    return _interleaved(rank, ranks, each, micro_batches, split=schedule == "InterleavedZeroBubble")


_KINDS: tuple[Kind, Kind] = ("F", "B")


def _breadth_first(stages: range, micro_batches: int) -> list[Action]:
    """All micro batches through a stage before the next; backward in exactly the opposite order."""
    forward = [Action("F", stage, i) for stage in stages for i in range(micro_batches)]
    return forward + [Action("B", stage, i) for _, stage, i in reversed(forward)]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    forward = [Action("F", rank, i) for i in range(micro_batches)]
    backward = [Action("B", rank, i) for i in range(micro_batches)]
    ahead = min(micro_batches, ranks - rank)
    # With as many on their way as fit, each backward makes room for a forward.
    paired = chain.from_iterable(zip(backward, forward[ahead:], strict=False))
    return [*forward[:ahead], *paired, *backward[micro_batches - ahead :]]


def _interleaved(rank: int, ranks: int, each: int, micro_batches: int, *, split: bool) -> list[Action]:
    """Rounds of micro batches through all stages of the rank; where split, weights follow `rank` backwards later."""
    rounds = max(1, micro_batches // ranks)
    size = micro_batches // rounds
    stages = range(rank, ranks * each, ranks)
    forward = list(_in_rounds("F", stages, rounds, size))
    backward = list(_in_rounds("I" if split else "B", stages[::-1], rounds, size))
    # Where weights' gradients can wait, half the lead hides the way there and back.
    ahead = min((each - 1) * size + (1 if split else 2) * (ranks - 1 - rank), len(forward))
    actions, forward = forward[:ahead], forward[ahead:]
    if not split:
        actions += chain.from_iterable(zip(forward, backward, strict=False))
        return actions + backward[len(forward) :]
    weights = list(_in_rounds("W", stages[::-1], rounds, size))
    for number, action in enumerate(backward):
        actions += forward[number : number + 1]
        actions.append(action)
        if number >= rank:
            actions.append(weights[number - rank])
    return actions + weights[max(0, len(backward) - rank) :]


def _in_rounds(kind: Kind, stages: range, rounds: int, size: int) -> Iterator[Action]:
    for start in range(0, rounds * size, size):
        for stage in stages:
            for i in range(start, start + size):
                yield Action(kind, stage, i)


def _zero_bubble_v(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """The V-shaped zero-bubble schedule; for few micro batches, that of 2 ranks - 1, less those that are not there."""
    first, last, count = rank, 2 * ranks - 1 - rank, max(2 * ranks - 1, micro_batches)
    actions: list[tuple[Kind, int, int]] = []
    down = 2 * (ranks - rank) - 1
    actions += [("F", first, i) for i in range(down)]
    for i in range(rank):
        actions += (("F", last, i), ("F", first, down + i))
    down, up = down + rank, rank
    for i in range(ranks - rank):
        actions += (("F", last, up + i), ("I", last, i), ("W", last, i))
    up, returned = ranks, ranks - rank
    steady = count - ranks
    for i in range(steady):
        if down + i < count:
            actions.append(("F", first, down + i))
        actions += (("I", first, i), ("W", first, i))
        actions += (("F", last, up + i), ("I", last, returned + i), ("W", last, returned + i))
    returned += steady
    for i in range(rank):
        actions += (("I", first, steady + i), ("I", last, returned + i))
    for i in range(ranks - rank):
        actions += (("I", first, steady + rank + i), ("W", first, steady + i))
    actions += [("W", last, i) for i in range(returned, count)]
    actions += [("W", first, i) for i in range(steady + ranks - rank, count)]
    return [Action(*action) for action in actions if action[2] < micro_batches]


class _DualPipeV:
    """The schedule of one rank of DualPipeV, in the eight steps of its authors."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.actions: list[Action] = []
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._stages = rank, 2 * ranks - 1 - rank
        self._pending: deque[tuple[int, int]] = deque()
        behind = ranks - 1 - rank
        for _ in range(2 * behind):
            self._forward(0)
        for _ in range(rank + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(behind):
            self._backward(1, "I")
            self._weights()
            self._forward(1)
        for _ in range(micro_batches - 2 * ranks + rank + 1):
            self._forward(0)
            self._backward(1, "B")
            self._forward(1)
            self._backward(0, "B")
        for _ in range(behind):
            self._backward(1, "B")
            self._forward(1)
            self._backward(0, "B")
        # In the second half of what is left, weights wait, so that the ranks before are not kept waiting.
        for number in range(2 * (rank + 1)):
            late = number > 2 * ((rank + 1) // 2) - rank % 2
            self._backward(1 - number % 2, "I" if late else "B")
        for _ in range(behind):
            self._weights()
            self._backward(0, "I")
        for _ in range(rank + 1):
            self._weights()

    def _forward(self, chunk: int) -> None:
        self.actions.append(Action("F", self._stages[chunk], self._forwards[chunk]))
        self._forwards[chunk] += 1

    def _backward(self, chunk: int, kind: Literal["B", "I"]) -> None:
        where = self._stages[chunk], self._backwards[chunk]
        self.actions.append(Action(kind, *where))
        self._backwards[chunk] += 1
        if kind == "I":
            self._pending.append(where)

    def _weights(self) -> None:
        if self._pending:
            self.actions.append(Action("W", *self._pending.popleft()))
