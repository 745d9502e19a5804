"""Nodes and ranks that state different jobs are refused by their keys, or train; of unequal memory they agree."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.commands import free_port, launch, launched
from tests.jobs import LLAMA
from tests.planned import job_of
from titan.config import Job, load_job
from titan.errors import ConfigError, TitanError
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, peak_bytes
from titan.ranks import failure, process
from titan.ranks.meeting.launch_env import LOCAL
from titan.ranks.meeting.same_job import APART, misfits, statement_of
from titan.testing.jobs import read_rows, write_text
from titan.testing.ranks import run_ranks
from titan.training import foresight

SEVERAL = """\
[optimizer]
groups = [{match = "head", lr = 0.1}]
[data]
workers = 1
[plugins.ema]
decay = 0.5
[tokenizer]
name = "bpe"
[model]
vocab_size = 4097
[[data.mixture]]
name = "text"
path = "a"
[[data.mixture]]
name = "jsonl"
path = "b"
weight = 2.0
"""
"""A job with several sources, groups, a technique, and a tokenizer with a file."""

OF_HOSTS = {"data.cache", "data.workers", "data.prepare_workers", "data.mixture.0.path"}
OF_HOSTS |= {"data.mixture.1.path", "tokenizer.path", "plugins.path"}
"""What may differ between the nodes of that job, beside the tables of trackers."""


def _leaves(value: Any, key: str = "") -> Iterator[str]:
    """The keys of a table, of the tables in its lists too."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield key
        return
    for name, item in value.items():
        yield from _leaves(item, f"{key}.{name}" if key else str(name))


def _changed(table: Any, key: str) -> Any:
    """A copy of a job's table with another value at a key."""
    table = json.loads(json.dumps(table))
    *path, last = [int(part) if part.isdecimal() else part for part in key.split(".")]
    inner = table
    for part in path:
        inner = inner[part]
    inner[last] = not inner[last] if isinstance(inner[last], bool) else "another"
    return table


def test_every_key_is_compared_but_for_those_of_hosts(tmp_path: Path) -> None:
    (tmp_path / "several.toml").write_text(f'base = "{LLAMA}"\n{SEVERAL}')
    job = load_job(tmp_path / "several.toml")
    ours = statement_of(job)
    keys = list(_leaves(job.table))
    assert len(keys) > 90 and set(keys) > OF_HOSTS
    for key in keys:
        if key.endswith(".name") and key.count(".") > 0 and key != "run.name":
            continue  # another plugin, which has other options
        sentences = misfits(statement_of(replace(job, table=_changed(job.table, key))), ours, "node 1", "node 0")
        tracker = key.startswith("metrics.") and key.count(".") > 1
        if key in OF_HOSTS or tracker:
            assert sentences == [], key
        else:
            assert len(sentences) == 1 and sentences[0].startswith(f"{key} = "), (key, sentences)


PLUGIN = '''
"""A schedule of a user's own."""

from titan.contracts import register
from titan.plugins.schedules.constant import Constant


@register
class Mine(Constant):
    """It {does}."""

    name = "mine"
'''


def _refusal(job: Job) -> str:
    """What this rank is refused with, if it is, as it joins."""
    try:
        process.join(job)
    except ConfigError as error:
        process.leave()
        return str(error)
    return ""


def _schedules(folder: Path) -> str:
    """What rank 1 is refused with, whose node has another file of the schedule."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    (own / "mine.py").write_text(PLUGIN.format(does="stays" if os.environ["RANK"] == "0" else "goes"))
    words = ("--data.path", "x", "--plugins.path", str(own), "--run.dir", str(folder), "--mesh.dp_shard", "2")
    return _refusal(load_job(LLAMA, (*words, "--lr_schedule.name", "mine"), 2))


def test_ranks_with_other_files_of_a_plugin_are_refused(tmp_path: Path) -> None:
    said, other = run_ranks(_schedules, 2, tmp_path, init=False)
    assert said == other and said.startswith("lr_schedule mine: its files have the hash "), said
    assert " on rank 1, but " in said


def _seeds(folder: Path) -> str:
    rank = os.environ["RANK"]
    words = ("--data.path", f"x{rank}", "--data.cache", f"c{rank}", "--run.dir", str(folder), "--mesh.dp_shard", "4")
    return _refusal(load_job(LLAMA, (*words, "--run.seed", "3" if rank == "2" else "2"), 4))


def test_a_rank_with_another_seed_ends_all(tmp_path: Path) -> None:
    said = "run.seed = 3 on rank 2, but 2 on rank 0; start all nodes with the same config, options and software"
    assert run_ranks(_seeds, 4, tmp_path, init=False) == 4 * [said]


def _of_two_runs(folder: Path) -> str:
    """Ranks 0 and 1 of a run of two; process 2 is rank 1 of another run, and process 3 has the number of rank 1 too."""
    number = int(os.environ["RANK"])
    os.environ |= {"RANK": str(min(number, 1)), "WORLD_SIZE": "2"}
    words = ("--data.path", "x", "--run.dir", str(folder), "--run.name", "b" if number == 2 else "a")
    try:
        process.join(load_job(LLAMA, (*words, "--mesh.dp_shard", "2"), 2))
    except TitanError as error:
        failure.report(error, 1)
        return str(error)
    finally:
        process.leave()
    return "joined"


TWICE = "is set in two processes, or a former process of this rank has met here"


def test_what_is_not_of_the_run_is_refused_alone(tmp_path: Path) -> None:
    first, one, stranger, other = run_ranks(_of_two_runs, 4, tmp_path, init=False)
    assert first == "joined"
    assert sorted((one, other)) == [f"RANK = 1 {TWICE}", "joined"]
    assert stranger.startswith("another run meets at MASTER_ADDR and MASTER_PORT, 127.0.0.1:")
    assert stranger.endswith(f" (run.name = 'b' on rank 1, but 'a' on rank 0); {APART}")


def _settled(folder: Path) -> str:
    """What memory decides on this rank, where rank 0 finds too little for what rank 1 has room for."""
    words = ("--data.path", "x", "--run.dir", str(folder), "--mesh.dp_shard", "2")
    job = load_job(LLAMA, (*words, "--plugins.activation_checkpoint.mode", "auto"), 2)
    mode = ("full", "none")[int(os.environ["RANK"])]
    foresight.choose = lambda job, device_gib: ({"activation_checkpoint": {"mode": mode}}, [])
    try:
        settled = foresight.settled(job, process.join(job))
        return str(settled.table["plugins"]["activation_checkpoint"]["mode"])
    finally:
        process.leave()


def test_what_memory_decides_is_rank_0s_to_decide(tmp_path: Path) -> None:
    assert run_ranks(_settled, 2, tmp_path, init=False) == ["full", "full"]


# --- two launchers ----------------------------------------------------------------------------------------------------

REFUSED = {"run.seed": "5", "run.device": "cpu", "run.max_minutes": "9"}
REFUSED |= {"train.grad_clip": "0.5", "train.non_finite": "skip", "checkpoint.enabled": "true"}
REFUSED |= {"checkpoint.init_from": "{}/text", "metrics.every": "2", "model.n_kv_heads": "4"}
REFUSED |= {"comm.checkpoint_timeout_s": "99", "model.tied": "true", "loss.z_loss": "1e-4"}
REFUSED |= {"optimizer.betas": "[0.8, 0.9]", "lr_schedule.decay_steps": "5", "plugins.bf16.enabled": "true"}
REFUSED |= {"mesh.dp_replicate": "2"}
"""Key -> another value than that of the job, for most tables; all keys are compared above. {}: the folder."""

ALLOWED = {"data.cache": "{}/another cache", "data.path": "{}/copy", "data.workers": "2"}
ALLOWED |= {"data.prepare_workers": "3", "metrics.console.enabled": "true", "plugins.path": "{}/plugins"}


def _two(folder: Path, name: str, *more: str) -> list[tuple[int, str]]:
    """How two nodes of one rank each end, and what they say; the second has more words than the first."""
    words = ["--config", str(LLAMA), "--run.dir", str(folder), "--run.name", name, "--data.path", f"{folder}/text"]
    words += ["--data.cache", f"{folder}/cache", "--train.steps", "2", "--comm.init_timeout_s", "60"]
    place = {"NNODES": 2, "NPROC": 1, "MASTER_ADDR": LOCAL, "MASTER_PORT": free_port()}
    with launched([*words, *more], **place, NODE_RANK=1) as other:
        return [launch(words, **place, NODE_RANK=0), other.end()]


@pytest.mark.sweep
def test_differences_of_two_launchers(tmp_path: Path) -> None:
    """Each is refused by its key on both nodes, or the run is that of two equal nodes."""
    write_text(tmp_path / "text")
    shutil.copytree(tmp_path / "text", tmp_path / "copy")
    (tmp_path / "plugins").mkdir()
    assert [code for code, _ in _two(tmp_path, "equal")] == [0, 0]
    wanted = {step: (row["loss"], row["grad_norm"]) for step, row in read_rows(tmp_path / "equal").items()}
    for key, value in {**REFUSED, **ALLOWED}.items():
        more = ("--mesh.dp_shard", "1") if key == "mesh.dp_replicate" else ()
        (code, said), (other_code, other_said) = _two(tmp_path, key, f"--{key}", value.format(tmp_path), *more)
        if key in ALLOWED:
            assert (code, other_code) == (0, 0), (key, said, other_said)
            rows = read_rows(tmp_path / key)
            assert {step: (row["loss"], row["grad_norm"]) for step, row in rows.items()} == wanted, key
        else:
            assert (code, other_code) == (2, 2), (key, said, other_said)
            assert all(f"{key} = " in words and "on node 1, but" in words for words in (said, other_said)), (key, said)
            assert not (tmp_path / key).exists(), "nothing is written"


WORDS = ("--mesh.dp_shard", "2", "--train.global_batch_size", "8", "--train.micro_batch_size", "2")


def _chosen(sizes: tuple[float, ...]) -> int | None:
    number = dist.get_rank()
    process.total_gib = lambda device: sizes[number]
    job = foresight.settled(job_of(*WORDS), process.Rank(number, len(sizes), number, torch.device("cpu")))
    return next(t.config.zero_stage for t in job.techniques if hasattr(t.config, "zero_stage"))


def test_the_smallest_device_counts() -> None:
    job = job_of(*WORDS)
    gib = peak_bytes(costs_of(job), job.layout, DeviceMemory(0.0)) / GIB
    assert run_ranks(_chosen, 2, (1.1 * gib, 1.1 * gib)) == [None, None]
    assert run_ranks(_chosen, 2, (1.1 * gib, 0.9 * gib)) == [3, 3]
