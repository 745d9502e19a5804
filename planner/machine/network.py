"""Time of collectives and sends between ranks, in seconds.

For a tensor of V bytes in a group of n ranks, each rank sends (n - 1) / n V bytes in an all-gather, a reduce-scatter or
an all-to-all, and twice that in an all-reduce (rings: Patarasu and Yuan, J. Parallel Distrib. Comput. 69, 2009). Where
a group spans a level of the network, all of its ranks below that level use their links at once: g ranks of a node drive
g links. In an all-to-all each rank sends its own numbers, so what crosses the level is g times as much, too. Each
doubling of the group adds one message latency.
"""

import math
from dataclasses import dataclass

from titan.contracts.base.collectives import PASSES
from titan.contracts.base.cost import Collective
from titan.planner.machine.cluster import Cluster, Link


@dataclass(frozen=True)
class Group:
    """A process group of `size` ranks, each `stride` global ranks after the one before."""

    size: int
    stride: int

    def within(self, ranks: int) -> int:
        """How many ranks of the group lie within `ranks` consecutive global ranks (0: any number)."""
        return self.size if not ranks else max(1, min(self.size, ranks // self.stride))


class Network:
    """Times collectives and sends over a cluster's links."""

    def __init__(self, cluster: Cluster) -> None:
        self.links = cluster.links

    def collective(self, kind: Collective, group: Group, bytes_: float) -> float:
        """Seconds of a collective.

        bytes_: the whole tensor: the result of an all-gather, the input of a reduce-scatter, a rank's tensor of others.
        """
        if group.size == 1 or not bytes_:
            return 0.0
        below, slowest, latency, exchange = 1, math.inf, 0.0, 0.0
        for link in self.links:
            here = group.within(link.ranks)
            if here > below:
                rate = link.bandwidth_gb_s * 1e9 * link.efficiency
                slowest = min(slowest, below * rate)
                exchange = max(exchange, (here - below) / group.size * bytes_ / rate)
                latency += math.log2(here / below) * link.latency_us * 1e-6
            below = here
        ring = (group.size - 1) / group.size * bytes_ / slowest
        return PASSES[kind] * ((exchange if kind == "all_to_all" else ring) + latency)

    def send(self, group: Group, bytes_: float) -> float:
        """Seconds to send `bytes_` to the next rank of a group, for the slowest pair."""
        link = self.between(group)
        return bytes_ / (link.bandwidth_gb_s * 1e9 * link.p2p_efficiency) + link.latency_us * 1e-6

    def between(self, group: Group) -> Link:
        """The innermost link that connects the whole group."""
        return next((link for link in self.links if group.within(link.ranks) == group.size), self.links[-1])
