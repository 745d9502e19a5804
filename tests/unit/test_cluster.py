"""Clusters: errors of their files name the table and the key; seconds of collectives over their networks, by hand."""

from dataclasses import replace

import pytest

from titan.errors import ConfigError
from titan.planner.machine import cluster
from titan.planner.machine import cluster as clusters
from titan.planner.machine.cluster import Link
from titan.planner.machine.network import Group, Network


def test_files_that_come_with_titan_are_read() -> None:
    for name in cluster.names():
        assert cluster.load(name).links, name


LEAST = {
    "device": {"name": "d", "memory_gib": 8, "bandwidth_gb_s": 100, "peak_tflops": {"float32": 1}},
    "links": [{"name": "l", "bandwidth_gb_s": 1}],
}
SITES = {"nodes_per_site": 2, "bandwidth_gbit_s": 8, "latency_ms": 5}


def test_sites_are_one_more_level_whose_bandwidth_the_ranks_of_a_site_share() -> None:
    """16 ranks of a site share 8 Gbit/s: each has 1/16 GB/s."""
    h100 = cluster.load("h100")
    there = cluster.from_table({"base": "h100", "between_sites": SITES}, "c.toml")
    node, fabric = h100.links
    assert there.links == (
        node,
        replace(fabric, ranks=16),
        Link(name="between sites", bandwidth_gb_s=1 / 16, latency_us=5000),
    )
    assert replace(there, name=h100.name, source=h100.source, links=h100.links) == h100
    near, far = (Network(there).collective("all_gather", group, 1e9) for group in (Group(2, 8), Group(4, 16)))
    assert near == pytest.approx(0.5 * 1e9 / (50e9 * fabric.efficiency) + fabric.latency_us * 1e-6, rel=1e-9)
    assert far == pytest.approx(0.75 * 1e9 / (1e9 / 16) + 2 * 5e-3, rel=1e-9)


def test_a_file_with_a_base_changes_what_it_says() -> None:
    found = cluster.from_table({"base": "h100", "name": "mine", "device": {"price": 1.5}}, "c.toml")
    h100 = cluster.load("h100")
    assert found == replace(h100, name="mine", device=replace(h100.device, price=1.5))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"links": ["NVLink"]}, r"\[links\.0\] = 'NVLink': must be a table"),
        ({"base": "h10"}, r"c\.toml: base: h10: no such file or cluster.*h100"),
        ({"base": "h100-sites"}, "base = 'h100-sites': has a base itself; name that one"),
        ({"base": "h100", "between_sites": {**SITES, "nodes_per_site": 0}}, "nodes_per_site = 0: must be at least 1"),
        ({"base": "h100", "between_sites": {"nodes_per_site": 2}}, "bandwidth_gbit_s"),
        (
            {**LEAST, "between_sites": SITES},
            r"\[between_sites\] needs two \[\[links\]\], the first with the ranks of a node; add them",
        ),
    ],
)
def test_what_cannot_be_is_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster.from_table(table, "c.toml")


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
