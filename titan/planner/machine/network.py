"""Seconds of collectives between ranks.

A group of n ranks that share V bytes sends (n - 1) / n V a rank for an all-gather or a reduce-scatter, twice that for
an all-reduce, and as much for an all-to-all of V bytes (rings: Patarasu and Yuan, J. Parallel Distrib. Comput. 69,
2009). Where a group crosses a level of the network, all its ranks below that level cross it together, so g ranks of a
node drive g links. Each doubling of the group costs a message's latency.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from titan.contracts.base.cost import Collective
from titan.planner.machine.cluster import Cluster, Link

PASSES: Mapping[Collective, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True)
class Group:
    """Ranks that stand `stride` apart, `size` of them."""

    size: int
    stride: int

    def within(self, ranks: int) -> int:
        """How many of them stand within `ranks` neighbouring ones (0: any number)."""
        return self.size if not ranks else max(1, min(self.size, ranks // self.stride))


class Network:
    """The links of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.links = cluster.links

    def collective(self, kind: Collective, group: Group, bytes_: float) -> float:
        """Seconds of a collective whose whole tensor has that many bytes."""
        if group.size == 1 or not bytes_:
            return 0.0
        below, slowest, latency = 1, math.inf, 0.0
        for link in self.links:
            here = group.within(link.ranks)
            if here > below:
                slowest = min(slowest, below * link.bandwidth_gb_s * 1e9 * link.efficiency)
                latency += math.log2(here / below) * link.latency_us * 1e-6
            below = here
        return PASSES[kind] * ((group.size - 1) / group.size * bytes_ / slowest + latency)

    def send(self, group: Group, bytes_: float) -> float:
        """Seconds to send to the neighbour in a group; the slowest pair's."""
        link = self.between(group)
        return bytes_ / (link.bandwidth_gb_s * 1e9 * link.p2p_efficiency) + link.latency_us * 1e-6

    def between(self, group: Group) -> Link:
        """The link that the farthest neighbours of a group have between them."""
        return next((link for link in self.links if group.within(link.ranks) == group.size), self.links[-1])
