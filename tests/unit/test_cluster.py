"""Cluster files: errors name the table and the key."""

from dataclasses import replace

import pytest

from titan.errors import ConfigError
from titan.planner.machine import cluster
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
        node, replace(fabric, ranks=16), Link(name="between sites", bandwidth_gb_s=1 / 16, latency_us=5000)
    )  # fmt: skip
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
        ({**LEAST, "between_sites": SITES},
         r"\[between_sites\] needs two \[\[links\]\], the first with the ranks of a node; add them"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster.from_table(table, "c.toml")
