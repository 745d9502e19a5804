"""`titan doctor` on gloo ranks: all is measured, a slow rank is named, and the file it writes is a cluster."""

import contextlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from titan import cli
from titan.planner.doctor import clock, device, links
from titan.planner.machine import cluster
from titan.testing.ranks import run_ranks

SLOW = 40


@contextmanager
def _small() -> Iterator[None]:
    work = {"SIZES": {"cpu": ((16, 16), (32, 32))}, "LARGE_BYTES": {"cpu": 1 << 16}, "FEATURES": 64}
    work |= {"DISK_BYTES": 1 << 10, "LAYER_NUMBERS": {"cpu": 1 << 10}, "ATTENTION": {"cpu": (1, 1, 16, 8)}}
    sent = {"cpu": (1 << 10, 1 << 16)}
    with patch.multiple(device, **work), patch.multiple(links, BYTES=sent, PAIR_BYTES=sent):
        yield


def _doctor(words: list[str], slow: int) -> dict[str, Any] | None:
    """What a rank prints; rank `slow` computes all alone again and again."""

    class Slow(clock.Clock):
        def each(self, work: clock.Work) -> clock.Time:
            times = SLOW if dist.get_rank() == slow else 1
            return super().each(lambda: [work() for _ in range(times)])

    out = io.StringIO()
    with _small(), patch("titan.planner.doctor.examination.Clock", Slow), contextlib.redirect_stdout(out):
        assert cli.main(["doctor", *words, "--json"]) == 0
    return json.loads(out.getvalue()) if out.getvalue() else None


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What rank 0 of two prints, rank 1 being slow, and the file it has written."""
    folder = tmp_path_factory.mktemp("doctor")
    words = ["--seconds", "1", "--disk", str(folder), "--output", str(folder / "c.toml")]
    first, second = run_ranks(_doctor, 2, words, 1, init=False)
    assert second is None, "one rank talks"
    assert [path.name for path in folder.iterdir()] == ["c.toml"], "what is written to the disk is removed"
    return first, folder / "c.toml"


def test_all_is_measured(examined: tuple[dict[str, Any], Path]) -> None:
    found, _ = examined
    assert found["world_size"] == found["ranks_per_node"] == len(found["ranks"]) == 2
    kinds = {row["kind"] for row in found["measured"]}
    assert kinds >= {"matrix products in float32", "matrix products in bfloat16", "attention", "memory", "norm", "disk"}
    assert kinds >= {"all_reduce of all ranks", "reduce_scatter of all ranks", "small all_to_all of all ranks"}
    assert {tuple(row["seconds"]) for row in found["measured"] if "messages" in row["kind"]} == {
        (f"{found['ranks'][0]} - {found['ranks'][1]}",)
    }
    assert all(seconds > 0 for row in found["measured"] for seconds in row["seconds"].values())


def test_a_slow_rank_is_named(examined: tuple[dict[str, Any], Path]) -> None:
    found, _ = examined
    slow = {(odd["subject"], odd["kind"]) for odd in found["outliers"] if odd["fault"] == "slow"}
    kinds = {"matrix products in float32", "matrix products in bfloat16", "attention", "memory", "norm", "activation"}
    named = [sum((rank, kind) in slow for kind in kinds) for rank in found["ranks"]]
    assert named[1] > 3 > 1 >= named[0]  # one by chance, on a busy machine


def test_the_file_is_a_cluster(examined: tuple[dict[str, Any], Path]) -> None:
    found, path = examined
    read = cluster.load(str(path))
    assert "ranks: 2, nodes: 1" in read.source
    assert len(read.products["float32"].curve()) == 2
    [link] = read.links
    assert link.bandwidth_gb_s == found["cluster"]["links"][0]["bandwidth_gb_s"] > 0


def _four_ranks_on_two_nodes() -> dict[str, Any] | None:
    with patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        return _doctor(["--seconds", "1"], slow=-1)


def test_two_nodes_have_two_links() -> None:
    found, *_ = run_ranks(_four_ranks_on_two_nodes, 4, init=False)
    assert [(link["name"], link["ranks"]) for link in found["cluster"]["links"]] == [
        ("within a node", 2),
        ("between nodes", 0),
    ]
    of_nodes = [row["seconds"] for row in found["measured"] if row["kind"] == "all_gather of a node"]
    assert [len(groups) for groups in of_nodes] == [2]
    assert {len(row["seconds"]) for row in found["measured"] if row["kind"] == "messages across nodes"} == {2}


def test_one_rank_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with _small():
        assert cli.main(["doctor", "--seconds", "0.2"]) == 0
    printed = capsys.readouterr().out
    assert "ranks: 1, 1 per node" in printed and "matrix products, float32, 32 x 32 x 32" in printed
    assert printed.endswith("No outliers.\n")
