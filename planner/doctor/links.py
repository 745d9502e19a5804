"""Measures the links: collectives over all ranks, within nodes and across nodes, and messages between pairs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist

from titan.contracts.base.cost import Collective
from titan.contracts.base.mesh import made_when_used
from titan.planner.doctor.clock import Clock, Work
from titan.planner.doctor.report import Reading
from titan.ranks.process import Rank

BYTES = {
    "cpu": (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22),
    "cuda": (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28),
}
"""Sizes of a collective's whole tensor, by device type."""

PAIR_BYTES = {"cpu": (1 << 10, 1 << 18, 1 << 22), "cuda": (1 << 10, 1 << 20, 1 << 26)}
SMALL = 1 << 14
"""Bytes up to which a message is judged by its latency."""

# Newer names of the same functions; the old names warn where both exist.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MOST_ROUNDS = 15
"""Maximum number of rounds of pairs; enough for all pairs of 16 ranks, or of 16 nodes."""


@dataclass(frozen=True)
class Layout:
    """Placement of ranks on nodes. per_node: ranks per node, the same on each.  names: of the ranks, in order."""

    world_size: int
    per_node: int
    names: Sequence[str]

    @property
    def nodes(self) -> int:
        """Number of nodes, each with `per_node` ranks."""
        return self.world_size // self.per_node

    def groups(self) -> dict[str, list[list[int]]]:
        """Groups that measure at the same time, by kind: "all ranks", "a node", "across nodes"; none of one rank."""
        everyone, n = list(range(self.world_size)), self.per_node
        found = {
            "all ranks": [everyone],
            "a node": [everyone[at : at + n] for at in range(0, self.world_size, n)] if self.nodes > 1 else [],
            "across nodes": [everyone[at::n] for at in range(n)] if 1 < n < self.world_size else [],
        }
        return {kind: groups for kind, groups in found.items() if groups and len(groups[0]) > 1}

    def rounds(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Rounds of disjoint pairs of ranks, each with its kind, "in a node" or "across nodes"."""
        n = self.per_node
        for pairs in _tournament(n):
            yield "in a node", [(node * n + a, node * n + b) for node in range(self.nodes) for a, b in pairs]
        for pairs in _tournament(self.nodes):
            yield "across nodes", [(a * n + local, b * n + local) for a, b in pairs for local in range(n)]

    def pair(self, a: int, b: int) -> str:
        """Name of a pair of ranks in rows and findings."""
        return f"{self.names[a]} - {self.names[b]}"


def _tournament(n: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each of n meets each other once (round-robin, circle method); the first MOST_ROUNDS of them."""
    seats = [*range(n), *([-1] if n % 2 else [])]
    rounds = []
    for _ in range(min(len(seats) - 1, MOST_ROUNDS)):
        met = [(min(p), max(p)) for p in zip(seats, reversed(seats), strict=True) if -1 not in p]
        rounds.append(sorted(set(met)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def slots(layout: Layout, device: torch.device) -> int:
    """Number of measurements that `measure` takes, for sharing out the time."""
    collectives = len(get_args(Collective)) * len(BYTES[device.type]) * len(layout.groups())
    return collectives + len(PAIR_BYTES[device.type]) * len(list(layout.rounds()))


def measure(clock: Clock, layout: Layout) -> list[Reading]:
    """Measure all collectives and pairs; returns the readings of this rank. All ranks call it."""
    taken = []
    for kind, groups in layout.groups().items():
        made = [dist.new_group(group, pg_options=made_when_used()) for group in groups]  # all ranks take part in each
        mine, members = next(pair for pair in zip(made, groups, strict=True) if clock.me.number in pair[1])
        names = f"{layout.names[members[0]]} to {layout.names[members[-1]]}"
        for collective in get_args(Collective):
            for size in BYTES[clock.me.device.type]:
                taken.append(_collective(clock, collective, mine, size, kind, names))
    # All ranks: a group of NCCL connects when its members use it, and in a round of pairs one may have no partner.
    dist.all_reduce(torch.zeros(1, device=clock.me.device))
    for kind, pairs in layout.rounds():
        for size in PAIR_BYTES[clock.me.device.type]:
            taken += _pair(clock, layout, pairs, size, kind)
    return taken


def _collective(
    clock: Clock, collective: Collective, group: dist.ProcessGroup, size: int, kind: str, subject: str
) -> Reading:
    ranks = group.size()
    piece = max(1, size // 4 // ranks)
    whole, part = (torch.zeros(n, device=clock.me.device) for n in (piece * ranks, piece))
    other = torch.empty_like(whole)
    work: dict[Collective, Work] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    took, bytes_ = clock.together(work[collective]), 4 * piece * ranks
    about = {"collective": collective, "group": kind, "ranks": ranks, "bytes": bytes_}
    return _reading(f"{collective} of {kind}", bytes_, subject, took.seconds, took.spread, about)


def _pair(clock: Clock, layout: Layout, pairs: Sequence[tuple[int, int]], size: int, kind: str) -> Iterator[Reading]:
    """A ping-pong message between the ranks of each pair."""
    mine = next((pair for pair in pairs if clock.me.number in pair), None)
    message = torch.ones(size // 4, device=clock.me.device)
    took = clock.together(_there_and_back(clock.me, mine, message) if mine else lambda: None)
    if mine:
        about = {"collective": "send", "group": kind, "ranks": 2, "bytes": size}
        yield _reading(f"messages {kind}", size, layout.pair(*mine), took.seconds / 2, took.spread, about)


def _there_and_back(me: Rank, pair: tuple[int, int], message: torch.Tensor) -> Callable[[], None]:
    first, second = pair

    def sends() -> None:
        dist.send(message, second)
        dist.recv(message, second)

    def answers() -> None:
        dist.recv(message, first)
        dist.send(message, first)

    return sends if me.number == first else answers


def _reading(kind: str, bytes_: int, subject: str, seconds: float, spread: float, about: dict[str, object]) -> Reading:
    """A reading; small messages are judged by latency, large ones by bandwidth."""
    small = bytes_ <= SMALL
    return Reading(
        kind=f"small {kind}" if small else kind,
        name=f"{kind}, {_size(bytes_)}",
        subject=subject,
        seconds=seconds,
        spread=spread,
        work=1 if small else bytes_,
        unit="us" if small else "GB/s",
        about=about,
    )


def _size(bytes_: int) -> str:
    return f"{bytes_ / 2**20:.3g} MiB" if bytes_ >= 2**20 else f"{bytes_ / 2**10:.3g} KiB"
