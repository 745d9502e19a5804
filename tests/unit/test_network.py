"""Seconds of collectives, by hand."""

from dataclasses import replace

import pytest

from titan.planner.machine import cluster as clusters
from titan.planner.machine.cluster import Link
from titan.planner.machine.network import Group, Network

NODE = Link(name="node", ranks=8, bandwidth_gb_s=100.0, latency_us=0.0, efficiency=0.5, p2p_efficiency=0.8)
FABRIC = Link(name="fabric", bandwidth_gb_s=10.0, latency_us=0.0, efficiency=0.5, p2p_efficiency=0.9)


def network(*links: Link) -> Network:
    """Nodes of eight."""
    return Network(replace(clusters.load("a100-80gb"), links=links or (NODE, FABRIC)))


@pytest.mark.parametrize(
    ("kind", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1), ("all_reduce", 2)]
)
def test_a_ring_inside_a_node(kind: str, passes: int) -> None:
    assert network().collective(kind, Group(4, 1), 1e9) == pytest.approx(passes * 0.75 * 1e9 / 50e9)  # type: ignore[arg-type]


def test_ranks_of_a_node_cross_the_fabric_together() -> None:
    """Eight neighbors of each node drive eight links; ranks a node apart drive one."""
    near, far = (network().collective("all_gather", group, 1e9) for group in (Group(16, 1), Group(16, 8)))
    assert near == pytest.approx(15 / 16 * 1e9 / (8 * 5e9))
    assert far == pytest.approx(15 / 16 * 1e9 / 5e9)


def test_in_an_all_to_all_each_rank_of_a_node_sends_its_own() -> None:
    """Of 16 ranks, 8 are in the other node, and each rank has one link to them."""
    near, far = (network().collective("all_to_all", group, 1e9) for group in (Group(16, 1), Group(16, 8)))
    assert near == pytest.approx(8 / 16 * 1e9 / 5e9)
    assert far == pytest.approx(15 / 16 * 1e9 / 5e9)


def test_the_slowest_level_counts() -> None:
    slow = replace(NODE, bandwidth_gb_s=8.0)
    assert network(slow, FABRIC).collective("all_gather", Group(16, 1), 1e9) == pytest.approx(15 / 16 * 1e9 / 4e9)


def test_each_doubling_costs_a_message() -> None:
    links = replace(NODE, latency_us=3.0), replace(FABRIC, latency_us=10.0)
    slow, ideal = (each.collective("all_gather", Group(32, 1), 1e6) for each in (network(*links), network()))
    assert slow - ideal == pytest.approx(3 * 3e-6 + 2 * 10e-6)


def test_one_rank_and_nothing_cost_nothing() -> None:
    assert network().collective("all_reduce", Group(1, 1), 1e9) == 0.0
    assert network().collective("all_reduce", Group(8, 1), 0.0) == 0.0


def test_sending_takes_the_link_that_the_farthest_neighbors_have() -> None:
    assert network().send(Group(4, 2), 1e9) == pytest.approx(1e9 / 80e9)
    assert network().send(Group(4, 8), 1e9) == pytest.approx(1e9 / 9e9)
    assert network(NODE, replace(FABRIC, latency_us=10.0)).send(Group(4, 8), 0.0) == pytest.approx(1e-5)
