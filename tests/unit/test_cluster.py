"""Cluster files: former keys still work, with one warning; errors name the table and the key."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planned import TOML
from titan.cli import main
from titan.errors import ConfigError
from titan.planner.machine import cluster
from titan.planner.machine.cluster import FORMER_KEYS, Cluster, Device, Kernels, Link, Products
from titan.planner.machine.network import Group, Network

RELEASED = Path(__file__).parents[1] / "released" / "26471e7" / "cluster.toml"
PRESENT = {
    "units": "compute_units", "bandwidth": "bandwidth_efficiency", "quantised": "wave_quantization",
    "depth": "k_half", "unaligned": "unaligned_factor", "odd": "unaligned_16b_factor", "gb_s": "bandwidth_gb_s",
    "pair_efficiency": "p2p_efficiency",
}  # fmt: skip
"""All former keys in the released file, and the present ones."""


def respelled(text: str) -> str:
    """A cluster file with the present keys."""
    pairs = [line.partition(" = ") for line in text.splitlines()]
    return "\n".join(PRESENT.get(key, key) + equals + value for key, equals, value in pairs)


def test_a_cluster_file_of_an_earlier_version_predicts_the_same_and_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former, present = tmp_path / "former.toml", tmp_path / "present.toml"
    former.write_text(RELEASED.read_text())
    present.write_text(respelled(RELEASED.read_text()))
    told = [predicted(path, capsys) for path in (former, present, former)]
    (found, warned), *others = told
    assert [json_ for json_, _ in others] == [found, found]
    assert warned.startswith(f"warning: {former} has former names of keys; rename ") and warned.count("\n") == 1
    assert set(warned.rstrip().partition("; rename ")[2].split(", ")) == {f"{a} to {b}" for a, b in PRESENT.items()}
    assert [said for _, said in others] == ["", ""]


def predicted(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """What titan plan prints for a cluster file: its JSON without the file's name, and stderr."""
    words = ["plan", "--config", str(TOML), "--mesh.tp", "2", "--mesh.pp", "2", "--cluster", str(path), "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out) | {"cluster": ""}, captured.err


def tables(keys: dict[type, dict[str, object]]) -> dict[str, object]:
    """A cluster file's tables with these keys beside the required ones."""
    device = {"name": "d", "memory_gib": 8, "bandwidth_gb_s": 100, "peak_tflops": {"float32": 1}, **keys[Device]}
    kernels = {"matmul": {"float32": keys[Products]}, **keys[Kernels]}
    return {"device": device, "kernels": kernels, "links": [{"name": "l", **keys[Link]}]}


VALUES: dict[str, object] = {"small_batch_dims": [2, 3]}


def read(former: bool) -> Cluster:
    """A cluster with every renamed key under its former or its present name, each of another value."""
    renamed = {config: list(keys.items()) for config, keys in FORMER_KEYS.items()}
    chosen = {
        config: {(old if former else new): VALUES.get(new, i + 2) for i, (old, new) in enumerate(keys)}
        for config, keys in renamed.items()
    }
    return cluster.from_table(tables(chosen), f"{'former' if former else 'present'}.toml")


def test_every_former_key_sets_the_field_of_the_present_one() -> None:
    assert read(former=True) == cluster.Cluster(**vars(read(former=False)) | {"name": "former"})


@pytest.mark.parametrize("config", FORMER_KEYS)
def test_former_and_present_key_of_one_option_are_refused(config: type) -> None:
    for old, new in FORMER_KEYS[config].items():
        keys: dict[type, dict[str, object]] = {Device: {}, Products: {}, Kernels: {}, Link: {"bandwidth_gb_s": 1}}
        keys[config] = keys[config] | {old: VALUES.get(new, 2), new: VALUES.get(new, 2)}
        said = rf"c\.toml: \[.*\] {old}: is the former name of {new}, and both are given; delete {old}"
        with pytest.raises(ConfigError, match=said):
            cluster.from_table(tables(keys), "c.toml")


def test_files_that_come_with_titan_have_the_present_keys() -> None:
    former = {key for keys in FORMER_KEYS.values() for key in keys}
    for name in cluster.names():
        text = (cluster.FOLDER / f"{name}.toml").read_text()
        assert not former & {line.split(" = ")[0] for line in text.splitlines()}, name
        assert cluster.from_table(tomllib.loads(text), name).links


def test_a_table_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[links\.0\] = 'NVLink': must be a table"):
        cluster.from_table({"links": ["NVLink"]}, "c.toml")


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
        ({"base": "h10"}, r"c\.toml: base: h10: no such file or cluster.*h100"),
        ({"base": "h100-sites"}, "base = 'h100-sites': has a base itself; name that one"),
        ({"base": "h100", "between_sites": {**SITES, "nodes_per_site": 0}}, "nodes_per_site = 0: must be at least 1"),
        ({"base": "h100", "between_sites": {"nodes_per_site": 2}}, "bandwidth_gbit_s"),
        ({**tables({Device: {}, Products: {}, Kernels: {}, Link: {"bandwidth_gb_s": 1}}), "between_sites": SITES},
         r"\[between_sites\] needs two \[\[links\]\], the first with the ranks of a node; add them"),
    ],
)  # fmt: skip
def test_sites_and_bases_that_cannot_be_are_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster.from_table(table, "c.toml")
