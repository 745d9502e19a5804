"""`titan doctor` without ranks: what it calls odd, the lines it draws, the pairs it makes, the file it writes."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import tomlkit
import torch

from titan import cli
from titan.contracts.base.cost import Collective
from titan.planner.doctor import cluster_file, collective_overhead, device
from titan.planner.doctor.clock import Time
from titan.planner.doctor.collective_overhead import GATHERED, SPLIT
from titan.planner.doctor.device import FROM_HOST
from titan.planner.doctor.links import MOST_ROUNDS, Layout
from titan.planner.doctor.report import Reading, Row, line, outliers, rows
from titan.planner.machine import cluster
from titan.planner.machine.network import Group, Network

RANKS = [f"rank {number}" for number in range(8)]
LAYOUT = Layout(8, 8, RANKS)
PAIRS = {LAYOUT.pair(a, b): (RANKS[a], RANKS[b]) for a, b in itertools.combinations(range(8), 2)}


def work(name: str, seconds: dict[str, float], spreads: dict[str, float] | None = None, unit: str = "GB/s") -> Row:
    spreads = {who: (spreads or {}).get(who, 0.05) for who in seconds}
    return Row(kind="work", name=name, work=1.0, unit=unit, about={}, seconds=seconds, spreads=spreads)


EQUAL, EQUAL_PAIRS = dict.fromkeys(RANKS, 1.0), dict.fromkeys(PAIRS, 1.0)
THIRD = {pair: 2.0 if "rank 3" in ends else 1.0 for pair, ends in PAIRS.items()}
ODD: dict[str, tuple[dict[str, float], dict[str, float], list[str]]] = {
    "equal ranks": (EQUAL, {}, []),
    "a slow half, found by the faster": (
        EQUAL | dict.fromkeys(RANKS[4:], 1.6),
        {},
        [f"{rank}: slow" for rank in RANKS[4:]],
    ),
    "two ranks": ({"rank 0": 1.0, "rank 1": 3.0}, {}, ["rank 1: slow"]),
    "ranks that all differ": ({rank: 1 + 0.1 * number for number, rank in enumerate(RANKS)}, {}, []),
    "slower by less than its repeats differ": (EQUAL | {"rank 5": 1.3}, dict.fromkeys(RANKS, 0.4), []),
    "an unsteady pair": (EQUAL_PAIRS, {"rank 2 - rank 6": 0.8}, ["rank 2 - rank 6: unsteady"]),
    "all pairs unsteady": (EQUAL_PAIRS, dict.fromkeys(PAIRS, 0.8), []),
    "a slow pair": (EQUAL_PAIRS | {"rank 2 - rank 6": 4.0}, {}, ["rank 2 - rank 6: slow"]),
    "a rank in place of its pairs": (THIRD, {}, ["rank 3, all 7 pairs: slow"]),
    "a rank and another pair": (
        THIRD | {"rank 0 - rank 1": 2.0},
        {},
        ["rank 3, all 7 pairs: slow", "rank 0 - rank 1: slow"],
    ),
    "a group without peers": ({"rank 0 to rank 7": 1.0}, {"rank 0 to rank 7": 9.0}, []),
}


def found_in(seconds: dict[str, float], spreads: dict[str, float], unit: str = "GB/s") -> list[str]:
    """What is odd where subjects take these times, in each of three sizes, with a little noise."""
    noise = random.Random(0)
    same = [
        work(f"size {size}", {who: size * s * noise.uniform(0.98, 1.02) for who, s in seconds.items()}, spreads, unit)
        for size in (1, 10, 100)
    ]
    return [f"{finding.subject}: {finding.fault}" for finding in outliers(same, PAIRS)]


@pytest.mark.parametrize(("seconds", "spreads", "odd"), ODD.values(), ids=ODD)
def test_what_is_odd(seconds: dict[str, float], spreads: dict[str, float], odd: list[str]) -> None:
    assert found_in(seconds, spreads) == odd


@pytest.mark.parametrize(
    ("factor", "unit", "odd"),
    [(1.3, "GB/s", True), (1.1, "GB/s", False), (0.5, "GB/s", False), (1.3, "us", False), (1.8, "us", True)],
)
def test_a_slow_rank_is_odd(factor: float, unit: str, odd: bool) -> None:
    assert found_in({**EQUAL, "rank 5": factor}, {}, unit) == ["rank 5: slow"] * odd


def test_slow_at_one_size_is_chance_and_how_slow_is_the_median_over_sizes() -> None:
    made = [work(str(size), {**EQUAL, "rank 5": 2.0 if size == 1 else 1.0}) for size in range(3)]
    assert outliers(made, PAIRS) == []
    [finding] = outliers([work(str(times), {"rank 0": 1.0, "rank 1": times}) for times in (2.0, 9.0)], PAIRS)
    assert (finding.subject, finding.by) == ("rank 1", pytest.approx(4.5))
    assert str(finding) == "rank 1: slow at work, takes 450% longer than its peers"


def test_a_group_takes_as_long_as_its_slowest_rank() -> None:
    made = rows(
        Reading(kind="k", name="n", subject="a group", seconds=seconds, spread=seconds, work=6.0, unit="us")
        for seconds in (1.0, 3.0, 2.0)
    )
    assert [(row.seconds, row.spreads) for row in made] == [({"a group": 3.0}, {"a group": 3.0})]


def test_a_line_has_its_latency_and_bandwidth_and_never_falls() -> None:
    points = [(3.0, size, 3 * 20e-6 + size / 10e9) for size in (1e3, 1e5, 1e7, 1e9)]
    assert line(points) == pytest.approx((20e-6, 1e-10), rel=1e-6)
    assert line([(1.0, 1e6, 2e-3), (1.0, 2e6, 1e-3)])[1] == 0.0
    latency, per_byte = line([(1.0, 1e3, 1e-7), (1.0, 1e6, 1.2e-4), (1.0, 1e7, 1.2e-3)])
    assert latency == 0.0 and per_byte == pytest.approx(1.16e-10, rel=0.05)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 5), (1, 8), (2, 4), (3, 1), (4, 2)])
def test_every_pair_of_a_node_and_of_nodes_meets_once(nodes: int, per_node: int) -> None:
    layout = Layout(nodes * per_node, per_node, RANKS)
    met: list[tuple[int, int]] = []
    for _, pairs in layout.rounds():
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members)), "a rank is in two pairs of a round"
        met += pairs
    every = itertools.combinations(range(layout.world_size), 2)
    near = [(a, b) for a, b in every if a // per_node == b // per_node or a % per_node == b % per_node]
    assert sorted(met) == sorted(near)


def test_many_nodes_do_not_all_meet() -> None:
    kinds = [kind for kind, _ in Layout(100, 2, ["?"] * 100).rounds()]
    assert kinds == ["in a node", *["across nodes"] * MOST_ROUNDS]


def test_groups() -> None:
    assert LAYOUT.groups() == {"all ranks": [list(range(8))]}
    assert Layout(4, 2, RANKS).groups() == {
        "all ranks": [[0, 1, 2, 3]],
        "a node": [[0, 1], [2, 3]],
        "across nodes": [[0, 2], [1, 3]],
    }
    assert Layout(2, 1, RANKS).groups() == {"all ranks": [[0, 1]]}
    assert Layout(1, 1, RANKS).groups() == {}


def test_what_whole_layers_take_is_no_part_of_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter((9.0, 1.0, 25.0, 1.0))
    clock = SimpleNamespace(
        me=SimpleNamespace(device=torch.device("cpu"), number=1), together=lambda work: Time(next(taken), 0.1)
    )
    mesh = SimpleNamespace(size=lambda: 2, get_group=lambda: SimpleNamespace(group_name="0"), get_local_rank=lambda: 1)
    monkeypatch.setattr(collective_overhead, "init_device_mesh", lambda *shape, **names: {"node": mesh})
    monkeypatch.setattr(collective_overhead, "fully_shard", lambda module, mesh: None)
    found = {reading.kind: reading for reading in collective_overhead.measure(clock, Layout(2, 2, RANKS))}  # type: ignore[arg-type]
    assert {kind: reading.seconds for kind, reading in found.items()} == {SPLIT: 2.0, GATHERED: 2.0}
    assert all(reading.about == {"ranks": 2} for reading in found.values())
    assert not list(collective_overhead.measure(clock, Layout(2, 1, RANKS)))  # type: ignore[arg-type]


def measured(layout: Layout, truth: cluster.Cluster) -> list[Row]:
    """What a device of 100 GFLOP/s and the links of `truth` would be measured to take."""

    def row(kind: str, work: float, seconds: float, unit: str, **about: object) -> Row:
        return Row(kind=kind, name=kind, work=work, unit=unit, about=about, seconds={"r": seconds}, spreads={"r": 0.0})

    network, stride, made = Network(truth), {"all ranks": 1, "a node": 1, "across nodes": layout.per_node}, []
    for rows_, features, tflops in ((64, 64, 0.05), (512, 512, 0.1)):
        flops = 6.0 * rows_ * features**2
        about = {"dtype": "float32", "rows": rows_, "features": features}
        made.append(row("matrix products in float32", flops, flops / tflops / 1e12, "TFLOP/s", **about))
    made += [row("attention", 1e9, 0.02, "TFLOP/s", dtype="float32"), row("attention", 3.5e9, 0.12, "TFLOP/s")]
    made += [row("memory", 8e9, 1.0, "GB/s"), row("memory", 12e9, 1.2, "GB/s")]
    made += [row("norm", 2e9, 0.5, "GB/s"), row("activation", 3e9, 0.5, "GB/s")]
    made.append(row("launch overhead", 1, 3e-6, "us"))
    for group, sets in layout.groups().items():
        for kind in get_args(Collective):
            for size in (1 << 10, 1 << 20, 1 << 26):
                took = network.collective(kind, Group(len(sets[0]), stride[group]), size)
                about = {"collective": kind, "group": group, "ranks": len(sets[0]), "bytes": size}
                made.append(row(kind, size, took, "GB/s", **about))
    for group, apart in (("in a node", 1), ("across nodes", layout.per_node)):
        for size in (1 << 10, 1 << 26):
            took = network.send(Group(2, apart), size)
            made.append(row("send", size, took, "GB/s", collective="send", group=group, ranks=2, bytes=size))
    for kind, beyond in ((SPLIT, 2e-3), (GATHERED, 1e-3)) if layout.per_node > 1 else ():
        latency = truth.links[0].latency_us * 1e-6 * math.log2(layout.per_node)
        made.append(row(kind, 1, latency + beyond, "us", ranks=layout.per_node))
    return made


def with_links(*links: cluster.Link) -> cluster.Cluster:
    table = {"device": {"name": "d", "memory_gib": 1, "bandwidth_gb_s": 1, "peak_tflops": {"float32": 1}}}
    return replace(cluster.from_table(table, "there"), links=links)


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    links = (
        cluster.Link(name="within a node", ranks=4, bandwidth_gb_s=8.0, latency_us=5.0, efficiency=0.5),
        cluster.Link(name="between nodes", bandwidth_gb_s=2.0, latency_us=30.0, p2p_efficiency=0.75),
    )
    layout, truth = Layout(8, 4, RANKS), with_links(*links)
    table = cluster_file.table(measured(layout, truth), layout, torch.device("cpu"), "a CPU", "measured, some day")
    (tmp_path / "c.toml").write_text(tomlkit.dumps(table))
    read = cluster.load(str(tmp_path / "c.toml"))
    assert (read.name, read.source) == ("a CPU, ranks: 8", "measured, some day")
    assert read.peak_tflops == {"float32": 0.1}
    assert read.products["float32"].curve() == [(524300.0, 5e10), (268400000.0, 1e11)]
    kernels = read.kernels
    assert (kernels.attention_forward, kernels.attention_backward) == pytest.approx((0.5, 0.25))
    reached = read.device.bandwidth_gb_s, kernels.bandwidth_efficiency, kernels.launch_us
    assert reached == pytest.approx((10.0, 0.5, 3.0))
    assert (kernels.tp_overhead_us, kernels.fsdp_overhead_us) == pytest.approx((2000.0, 1000.0), rel=1e-3)
    for back, link in zip(read.links, links, strict=True):
        assert (back.name, back.ranks) == (link.name, link.ranks)
        assert back.latency_us == pytest.approx(link.latency_us, rel=1e-3)
        assert back.bandwidth_gb_s * back.efficiency == pytest.approx(link.bandwidth_gb_s * link.efficiency, rel=1e-3)
        message = link.bandwidth_gb_s * link.p2p_efficiency
        assert back.bandwidth_gb_s * back.p2p_efficiency == pytest.approx(message, rel=1e-3)


def test_one_rank_has_no_links_and_copies_from_the_host_are_written() -> None:
    layout = Layout(1, 1, RANKS)
    rows_ = measured(layout, with_links(cluster.Link(name="none", bandwidth_gb_s=1.0)))
    table = cluster_file.table(rows_, layout, torch.device("cpu"), "a CPU", "")
    assert table["links"] == [] and "host_gb_s" not in table["device"]
    seconds = {"rank 0": 0.1, "rank 1": 0.2, "rank 2": 0.4}
    copies = Row(kind=FROM_HOST, name="a copy", work=4e9, unit="GB/s", about={}, seconds=seconds, spreads=seconds)
    table = cluster_file.table([*rows_, copies], layout, torch.device("cpu"), "a GPU", "")
    assert cluster.from_table(table, "there").device.host_gb_s == 20.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "--seconds 0: must be above 0"),
        (["--disk", "nowhere"], "--disk nowhere: no such folder"),
        (["--output", "."], "--output .: is a folder; name a file"),
    ],
)
def test_what_is_asked_wrongly(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert capsys.readouterr().err == f"error: command line: {said}\n"


def test_a_disk_that_cannot_be_written_to(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "measure", device.on_disk)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    assert cli.main(["doctor", "--disk", "nowhere"]) == 1
    assert capsys.readouterr().err == "error: nowhere/.titan-doctor-0: No such file or directory\n"
