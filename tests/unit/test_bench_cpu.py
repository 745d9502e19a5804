"""`python -m bench.peers`, `bench.saves`, `bench.data`, `bench.memory`: their figures, and tiny runs of their parts."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from bench import data, memory, peers, saves
from bench.arguments import count
from bench.gpu import jobs

TINY = {"model.n_layers": 1, "model.dim": 32, "model.n_heads": 2}
TINY |= {"model.n_kv_heads": 2, "model.ffn_dim": 32, "data.seq_len": 16}
WORDS = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]


def _met(figures: list[tuple[str, str, str, bool | None]]) -> dict[str, bool | None]:
    assert len({what for what, *_ in figures}) == len(figures)
    return {what: met for what, _, _, met in figures}


def test_a_count_is_a_whole_number_from_1_on() -> None:
    assert count("12") == 12
    for word in ("0", "-3", "1.5", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 on"):
            count(word)


def test_figures_of_peers_are_of_titan_without_and_with_its_kernel() -> None:
    def rows(**seconds: float) -> dict[str, Any]:
        return {name: {"seconds": [took, took, 99.0]} for name, took in seconds.items()}

    alone = rows(titan=2.0, bare=2.2, torchtitan=1.0)
    both = alone | {peers.KERNEL: {"seconds": [1.0]}}
    on_two = rows(titan=2.0, torchtitan=2.0) | {peers.KERNEL: {"seconds": [1.0]}}
    compiled = both | rows(litgpt=1.8)
    found = {"rows": {"fp32": both, "alone": alone, "pp 2": on_two, peers.COMPILED: compiled}}
    assert [(what, measured, met) for what, _, measured, met in peers.figures(found)] == [
        ("fp32: speed over a bare loop", "1.10", True),
        ("fp32: with titan's kernel, speed over a bare loop", "2.20", True),
        ("alone: speed over a bare loop", "1.10", True),
        ("alone: with titan's kernel, speed over a bare loop", "not here", None),
        ("pp 2: speed over torchtitan", "1.00", False),
        ("pp 2: with titan's kernel, speed over torchtitan", "2.00", True),
        ("bf16, compiled: speed over a bare loop", "1.10", True),
        ("bf16, compiled: speed over the best peer", "0.50", False),
        ("bf16, compiled: with titan's kernel, speed over the best peer", "1.00", False),
    ]


def _saves(titan_s: float, stall_s: float) -> dict[str, Any]:
    taken = {saves.TITAN: titan_s, saves.TORCH: 2.0, saves.SYNCED: 3.0, saves.NEW: 1.0, saves.DCP: 4.0}
    aside = {"stall_s": [stall_s], "quiet_s": [1.0, 2.0, 3.0], "writing_s": [4.0], "write_s": [5.0]}
    loads = {saves.VERIFY: [3.0], saves.READ: [1.0], saves.TORCH_LOAD: [2.0]}
    more = {"load_s": loads, "remove_s": [0.5], "memory_bytes": {"a synchronous": [0.0, 1.1e8]}}
    return {"bytes": 10**8, "save_s": {who: [s, s, 9.0] for who, s in taken.items()}, "async": aside, **more}


def test_figures_of_saves_are_ratios_of_medians() -> None:
    _, _, measured, met = zip(*saves.figures(_saves(2.6, 0.1)), strict=True)
    assert measured[:4] == ("1.30 (2.600 s of 100 MB)", "1.50", "0.50", "2.00")
    assert measured[4:] == ("0.50 (1000 ms)", "1.50", "500 ms", "1.10", "5.0 % (100 ms)", "2.00")
    assert met == (True, None, None, None, True, None, None, False, True, None)
    assert [met for *_, met in saves.figures(_saves(2.7, 0.11))][::8] == [False, False]


def test_saves_are_measured_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: None)  # it waits for what other tests write, too
    found = saves.measure(tmp_path, 2, **TINY)
    assert {len(seconds) for seconds in found["save_s"].values()} == {2}
    assert len(found["async"]["stall_s"]) == len(found["async"]["write_s"]) == 2
    assert len(found["async"]["quiet_s"]) == 2 * saves.QUIET_STEPS
    found["async"]["writing_s"] = found["async"]["writing_s"] or [1.0]  # a tiny checkpoint may be written at once
    assert {len(seconds) for seconds in (*found["load_s"].values(), found["remove_s"])} == {2}
    assert found["bytes"] > 0 and len(saves.figures(found)) == 11
    assert len(list((tmp_path / "overhead" / "checkpoints").iterdir())) == 1


def test_figures_of_the_loader() -> None:
    packings = {"concat": {"batch_s": [0.02], "step_s": [1.0]}, "pad": {"batch_s": [0.021], "step_s": [1.0]}}
    found = {"tokens_per_step": 1000, "packings": packings, "resume_s": {"text": [0.9, 1.0, 3.0], "jsonl": [1.1]}}
    _, _, measured, met = zip(*data.figures(found), strict=True)
    assert met == (True, False, True, False)
    assert measured[0::2] == ("50 (50,000 and 1,000 tokens/s)", "1.000 s (slowest 3.000 s)")


def test_the_loader_is_measured_resumed_and_beside_training(tmp_path: Path) -> None:
    found = data.measure(tmp_path, 1, 1 << 12, **TINY)
    assert list(found["packings"]) == list(data.PACKINGS) and list(found["resume_s"]) == ["shards", "text", "jsonl"]
    assert found["tokens_per_step"] == data.SAMPLES * 16
    assert len(_met(data.figures(found))) == 5


def test_figures_of_memory_are_of_the_largest_rank() -> None:
    def row(planned: float) -> dict[str, Any]:
        kinds = {kind: [50.0, planned] for kind in memory.KINDS}
        return {
            "planned_mib": kinds,
            "dry_run_mib": {kind: [100.0, 90.0] for kind in memory.KINDS},
            "measured_mib": [[80.0], [120.0, 130.0, 900.0]],
        }

    figures = memory.figures({"rows": {"one": row(102.9), "two": row(96.9)}})
    assert list(_met(figures).values()) == [True, True, None, False, False, None]
    assert figures[0][2] == "+2.9 % (103 and 100 MiB)" and figures[2][2] == "1.26 and 1.30 (130 MiB)"


def test_memory_is_predicted_of_each_rank() -> None:
    for found in memory.predicted([*memory.SHARED, *WORDS, *memory.CASES["fsdp 2"].words], 2):
        assert list(found) == list(memory.KINDS)
        assert all(len(ranks) == 2 and min(ranks) > 0 for ranks in found.values())


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads /proc")
def test_memory_is_measured_in_each_step(tmp_path: Path) -> None:
    shard = jobs.tokens(tmp_path, memory.WORDS, 1 << 12)
    own = ["--run.dir", str(tmp_path), "--data.name", "shards", "--data.path", str(shard)]
    assert len(memory.peaks([*memory.SHARED, *WORDS, *own], 2)) == 2


def test_the_pipeline_has_four_micro_batches() -> None:
    case = memory.CASES["pp 2, 1F1B"]
    assert memory.load_job(memory.CONFIG, [*memory.SHARED, *case.words], case.ranks).micro_batches == 4
