"""Seconds of a checkpoint: titan's beside torch.save, torch.load and torch.distributed.checkpoint (DCP), in turns.

    python -m bench.saves [--steps 10] [--folder .]

Saves the model and the AdamW state of bench/overhead.toml on one rank in fp32, 107 MB. First the synchronous saves in
turns: titan's, which hashes, syncs and commits its files; torch.save of the two state dicts to one file, alone, with
fsync, and to a new file; and DCP, which syncs. The others replace what they wrote the turn before: titan removes it on
another thread while training goes on, which is timed apart.

Then loads, also in turns: titan's, which verifies every byte and then reads into the model's and the optimizer's
tensors, each of the two alone; and torch.load, which makes new tensors. Then titan's asynchronous save: how long
training waits for it, and how much slower the steps are that begin while it writes. At last the memory that a save of
either kind adds to the peak of the process, beside the bytes it saves.

Writes all samples under bench/results, and deletes the checkpoints.
The figures are those of a disk: choose one with --folder. In memory (tmpfs) a sync costs nothing.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_saver as dcp
from tqdm import tqdm

from bench import peak, results
from bench.arguments import count
from bench.gpu import jobs
from titan.config import load_job
from titan.ranks import process
from titan.training import build, trainer

CONFIG = Path(__file__).parent / "overhead.toml"
WORDS, TOKENS = 4097, 1 << 20
"""Ids of the model's vocabulary; tokens of the shard that it is trained on."""

SAMPLES = 8
"""Sequences of 512 tokens per step. A short step makes the share of a stall large."""

SAVE_TARGET = 1.3
"""A synchronous save takes at most this many times the seconds of torch.save without a sync."""

LOAD_TARGET = 1.0
"""To read a verified checkpoint takes at most this many times the seconds of torch.load."""

MEMORY_TARGET = 1.05
"""A save adds at most this many times the bytes that its rank saves to the peak of host memory."""

STALL_TARGET = 0.05
"""An asynchronous save stalls training for at most this share of a step."""

TITAN, TORCH, SYNCED, NEW, DCP = "titan", "torch.save", "torch.save, fsync", "torch.save, new file", "DCP"
VERIFY, READ, TORCH_LOAD = "titan, verify", "titan, read", "torch.load"
QUIET_STEPS = 2
"""Measured steps before each asynchronous save, while nothing is written."""

Figure = tuple[str, str, str, bool | None]
"""What is asked, the target ("" without one), what was measured, and whether that meets the target."""


def main() -> None:
    """Measure the saves, print the figures, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=10, help="measured saves of each kind, after one")
    parser.add_argument("--folder", type=Path, default=Path(), help="where checkpoints are written for a while")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="saves-", dir=args.folder) as folder:
        found = measure(Path(folder), args.steps)
    for what, target, measured, _ in figures(found):
        print(f"{what}: {measured}" + (f" ({target})" if target else ""))
    print(results.write("saves", found))


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """Figure by figure: what was asked of saves, the target, what was measured, and whether it is met."""
    seconds = {who: statistics.median(each) for who, each in found["save_s"].items()}
    ratios = {who: each / seconds[TORCH] for who, each in seconds.items()}
    stall, step, writing = (statistics.median(found["async"][key]) for key in ("stall_s", "quiet_s", "writing_s"))
    return [
        (
            "synchronous save, relative to torch.save",
            f"at most {SAVE_TARGET:g}",
            f"{ratios[TITAN]:.2f} ({seconds[TITAN]:.3f} s of {found['bytes'] / 1e6:.0f} MB)",
            ratios[TITAN] <= SAVE_TARGET,
        ),
        ("torch.save with fsync, relative to torch.save", "", f"{ratios[SYNCED]:.2f}", None),
        ("torch.save to a new file, relative to one that replaces", "", f"{ratios[NEW]:.2f}", None),
        ("DCP, relative to torch.save", "", f"{ratios[DCP]:.2f}", None),
        *_more_figures(found),
        (
            "stall of an asynchronous save, share of a step",
            f"at most {100 * STALL_TARGET:g} %",
            f"{100 * stall / step:.1f} % ({1e3 * stall:.0f} ms)",
            stall / step <= STALL_TARGET,
        ),
        ("steps while it writes, relative to others", "", f"{writing / step:.2f}", None),
    ]


def _more_figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Those of loads, removals and memory."""
    loads = {who: statistics.median(each) for who, each in found["load_s"].items()}
    read = loads[READ] / loads[TORCH_LOAD]
    shown, met = f"{read:.2f} ({1e3 * loads[READ]:.0f} ms)", read <= LOAD_TARGET
    yield "reading a verified checkpoint, relative to torch.load", f"at most {LOAD_TARGET:g}", shown, met
    yield "verifying it, relative to torch.load", "", f"{loads[VERIFY] / loads[TORCH_LOAD]:.2f}", None
    removal = 1e3 * statistics.median(found["remove_s"])
    yield "removing the checkpoint before, beside training", "", f"{removal:.0f} ms", None
    for kind, peaks in found["memory_bytes"].items():
        share = max(peaks) / found["bytes"]
        what = f"memory of {kind} save, relative to its bytes"
        yield what, f"at most {MEMORY_TARGET:g}", f"{share:.2f}", share <= MEMORY_TARGET


def measure(folder: Path, rounds: int, **keys: object) -> dict[str, Any]:
    """Train, save and load in all ways; returns the samples, in seconds, and the bytes of a checkpoint.

    folder: on the disk that is measured.  rounds: of each kind of save.  keys: overrides, with `__` for each dot.
    """
    words = {
        "run.dir": folder,
        "run.device": "cpu",
        "checkpoint.enabled": True,
        "checkpoint.async": False,
        "checkpoint.keep_latest": 1,
        "checkpoint.resume": "never",
        "validation.every": 0,
        "tokenizer.name": "byte",
        "data.name": "shards",
        "data.path": jobs.tokens(folder, WORDS, TOKENS),
        "train.global_batch_size": SAMPLES,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    job = load_job(CONFIG, [word for key, value in words.items() for word in (f"--{key}", str(value).lower())], 1)
    run = build.build(job, process.join(job))
    gc.disable()  # as in training
    try:
        trainer.step(run, next(run.loader))  # makes the optimizer's state
        memory = {"a synchronous": _peaks(run, False), "an asynchronous": _peaks(run, True)}
        saves, removals = _synchronous(run, folder, rounds)
        assert run.checkpointer is not None
        path = next(run.checkpointer.folder.glob("step-*"))
        return {
            "bytes": sum(file.stat().st_size for file in path.iterdir()),
            "save_s": saves,
            "remove_s": removals,
            "load_s": _loads(run, path, folder / "plain.pt", rounds),
            "async": _aside(run, rounds),
            "memory_bytes": memory,
        }
    finally:
        gc.enable()
        trainer.close(run)
        process.leave()


def _synchronous(run: build.Run, folder: Path, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each save, by who saves, each in turn the first of a round; and of titan's removals after it."""
    assert run.checkpointer is not None
    ways: dict[str, Callable[[], None]] = {
        TITAN: lambda: _again(run),
        TORCH: lambda: _torch_save(run, folder / "plain.pt"),
        SYNCED: lambda: _torch_save_synced(run, folder / "synced.pt"),
        NEW: lambda: _torch_save(run, folder / "new.pt"),
        DCP: lambda: _dcp_save(run, folder / "dcp"),
    }
    taken: dict[str, list[float]] = {who: [] for who in ways}
    removals: list[float] = []
    names = list(ways)
    for number in tqdm(range(rounds + 1), desc="saves", disable=None):
        at = number % len(names)
        for who in (*names[at:], *names[:at]):
            (folder / "new.pt").unlink(missing_ok=True)
            os.sync()  # what another has left to be written is not for this one to wait for
            seconds = _seconds(ways[who])
            rest = _seconds(run.checkpointer.close)  # not beside what comes next
            taken[who] += [seconds] * (number > 0)
            removals += [rest] * (number > 0 and who == TITAN)
    return taken, removals


def _loads(run: build.Run, path: Path, plain: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each part of titan's load, and of torch.load, in turns, of files that the system has in memory."""
    assert run.checkpointer is not None
    checkpointer, states = run.checkpointer, run.techniques_state()
    ways: dict[str, Callable[[], object]] = {
        VERIFY: lambda: checkpointer.find("auto"),
        READ: lambda: checkpointer.load(path, run.parts, run.optimizer, states),
        TORCH_LOAD: lambda: torch.load(plain),
    }
    taken: dict[str, list[float]] = {who: [] for who in ways}
    for number in tqdm(range(rounds + 1), desc="loads", disable=None):
        for who, way in ways.items():
            gc.collect()
            seconds = _seconds(way)
            taken[who] += [seconds] * (number > 0)
    return taken


def _peaks(run: build.Run, asynchronous: bool) -> list[float]:
    """Bytes that each of three saves adds to what the process held before the first of them."""
    assert run.checkpointer is not None
    run.checkpointer.asynchronous = asynchronous
    peak.forget_peak()
    before, found = peak.status_mib("VmRSS"), []
    for _ in range(3):
        _again(run)
        run.checkpointer.wait()
        found.append((peak.peak_mib() - before) * 2**20)
    run.checkpointer.asynchronous = False
    return found


def _again(run: build.Run) -> None:
    """Save this state as that of the next step: a step is saved once."""
    run.step += 1
    trainer.save(run)


def _state(run: build.Run) -> dict[str, Any]:
    """What a user of PyTorch saves of a model on one device."""
    (part,) = run.parts
    return {"model": part.module.state_dict(), "optimizer": run.optimizer.state_dict(), "step": run.step}


def _torch_save(run: build.Run, path: Path) -> None:
    torch.save(_state(run), path)


def _torch_save_synced(run: build.Run, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(_state(run), file)
        file.flush()
        os.fsync(file.fileno())


def _dcp_save(run: build.Run, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces what it wrote before
        dcp.save(_state(run), checkpoint_id=path)


def _aside(run: build.Run, rounds: int) -> dict[str, list[float]]:
    """Of saves in the background, in seconds: stall_s, until a save returns; quiet_s and writing_s, steps that begin
    while nothing and while a checkpoint is written; write_s, from the start of a save until it is on the disk."""
    assert run.checkpointer is not None
    run.checkpointer.asynchronous = True
    _again(run)  # takes the memory of the copy, which later saves use again
    run.checkpointer.wait()
    taken: dict[str, list[float]] = {"stall_s": [], "quiet_s": [], "writing_s": [], "write_s": []}
    for _ in tqdm(range(rounds), desc="asynchronous saves", disable=None):
        taken["quiet_s"] += [_step(run) for _ in range(QUIET_STEPS)]
        os.sync()
        began = time.perf_counter()
        taken["stall_s"].append(_seconds(lambda: _again(run)))
        writer = run.checkpointer._writer
        while writer is not None and writer.is_alive():
            taken["writing_s"].append(_step(run))
        run.checkpointer.wait()
        taken["write_s"].append(time.perf_counter() - began)
    return taken


def _step(run: build.Run) -> float:
    """Seconds of a step; its batch is there before."""
    batch = next(run.loader)
    return _seconds(lambda: float(trainer.step(run, batch).grad_norm))


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
