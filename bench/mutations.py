"""Fuzzes the bytes of every file of a checkpoint: each mutation must be refused with a message, or be harmless.

    python -m bench.mutations --n 1000 --seed 0

Each mutation loads in its own child process, with limits of time and memory, so that hangs, crashes of the interpreter
and runaway allocations are counted. Half of the mutations get a matching new manifest, as an attacker would write; the
others keep the manifest of the save.
"""

import argparse
import collections
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan.checkpoint import Checkpointer, rng_state, set_rng_state
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.manifest import MANIFEST
from titan.contracts import ModelPart
from titan.errors import EXIT_WRONG_INPUT, CheckpointError

SECONDS = 20
"""Limit of CPU seconds per child, and half the limit of wall time; a load takes milliseconds."""
BYTES = 2 << 30
"""Limit of the address space in bytes that a child may add."""

REFUSED, LOADED, OTHER, STUCK = range(4)
OUTCOMES = ("refused", "loaded", "other exception", "hung", "crashed")


def build() -> tuple[list[ModelPart], torch.optim.Optimizer]:
    """A small model and its optimizer, with the state of two steps."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "out": nn.Linear(4, 3)})
    model.register_buffer("seen", torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for parameter in model.parameters():
            # Not by a backward, which PyTorch refuses in a child whose parent has made one for a device, dry or not.
            parameter.grad = 2 * parameter.detach()
        optimizer.step()
    return [ModelPart(model)], optimizer


def save(folder: Path) -> Path:
    """Save a checkpoint of that model with state of every kind; returns its folder."""
    parts, optimizer = build()
    rest = {
        "config": {"model": {"name": "toy"}},
        "step": 2,
        "tokens": 14,
        "data": {"samples": 2},
        "techniques": {"ema": {"shadow": torch.ones(3), "list": [1, None, "two"]}},
        "rng": rng_state(torch.device("cpu")),
    }
    checkpointer(folder).save(2, parts, optimizer, rest)
    return folder / "step-00000002"


def checkpointer(folder: Path, keep: int = 0) -> Checkpointer:
    """A synchronous checkpointer of one process in a folder. keep: checkpoints to keep, 0: all."""
    return Checkpointer(folder, keep=keep, asynchronous=False, rank=0, world_size=1)


def load(path: Path) -> None:
    """Load a checkpoint as a run does.

    Raises:
        CheckpointError: the checkpoint is refused.
    """
    parts, optimizer = build()
    rest = checkpointer(path.parent).load(path, parts, optimizer)
    set_rng_state(rest.get("rng", {}), torch.device("cpu"))


def reseal(path: Path) -> None:
    """Write a manifest that matches the changed files."""
    names = [name for name in manifest.names_in(path) if name != MANIFEST]
    manifest.write(path, {name: manifest.entry_of(path / name) for name in names})


def mutate(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """One random change of `data`: (kind of the mutation, changed bytes)."""
    kind = draw.choice(("flip", "truncate", "insert", "delete", "splice", "zero", "byte"))
    at, other = draw.randrange(len(data)), draw.randrange(len(data))
    size = min(len(data) - at, 1 << draw.randrange(10))
    changed = bytearray(data)
    if kind == "flip":
        for _ in range(draw.choice((1, 1, 1, 8))):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "truncate":
        del changed[at:]
    elif kind == "insert":
        changed[at:at] = draw.randbytes(size)
    elif kind == "delete":
        del changed[at : at + size]
    elif kind == "splice":
        changed[at : at + size] = data[other : other + size]
    elif kind == "zero":
        changed[at : at + size] = bytes(size)
    else:
        changed[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, *b'"[]{},:0-e'))
    return kind, bytes(changed)


def mutations(sound: Path, work: Path, count: int, seed: int) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield `count` mutated copies of a checkpoint: (file, kind and manifest of the mutation; folder of the copy)."""
    draw = random.Random(seed)
    names = manifest.names_in(sound)
    while count:
        name = draw.choice(names)
        data = (sound / name).read_bytes()
        kind, changed = mutate(data, draw)
        sealed = draw.random() < 0.5 and name != MANIFEST
        if changed == data:
            continue
        path = work / sound.name
        shutil.copytree(sound, path)
        (path / name).write_bytes(changed)
        if sealed:
            reseal(path)
        yield {"file": name, "kind": kind, "manifest": "anew" if sealed else "as saved"}, path
        shutil.rmtree(path)
        count -= 1


def attempt(act: Callable[[], object]) -> tuple[str, str]:
    """Run `act` in a child process within the limits: (one of OUTCOMES, its message)."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        os._exit(_act(act, tell))
    os.close(tell)
    deadline = time.monotonic() + 2 * SECONDS
    with os.fdopen(told, "rb") as stream:
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                time.sleep(0.002)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return OUTCOMES[STUCK], "ended by force"
        words = stream.read().decode(errors="replace")
    if os.WIFSIGNALED(status):
        hung = os.WTERMSIG(status) == signal.SIGXCPU
        return OUTCOMES[3 if hung else 4], signal.strsignal(os.WTERMSIG(status)) or ""
    code = os.WEXITSTATUS(status)
    return OUTCOMES[code] if code < len(OUTCOMES) else OUTCOMES[4], words


def _act(act: Callable[[], object], tell: int) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    try:
        act()
    except CheckpointError as error:
        os.write(tell, str(error).encode(errors="replace")[:4000])
        return REFUSED if error.exit_code == EXIT_WRONG_INPUT else OTHER
    except BaseException as error:
        os.write(tell, f"{type(error).__name__}: {error}".encode(errors="replace")[:4000])
        return OTHER
    return LOADED


def run(count: int, seed: int) -> dict[str, Any]:
    """Counts of outcomes by file and manifest, and all mutations that were neither refused nor harmless."""
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    bad = []
    with tempfile.TemporaryDirectory() as name:
        sound = save(Path(name) / "sound")
        load(sound)
        for about, path in mutations(sound, Path(name) / "mutated", count, seed):
            outcome, said = attempt(lambda path=path: load(path))  # type: ignore[misc]
            counts[f"{about['file']}, manifest {about['manifest']}: {outcome}"] += 1
            if harmful(about, outcome, said):
                bad.append({**about, "outcome": outcome, "said": said})
    return {"n": count, "seed": seed, "outcomes": dict(sorted(counts.items())), "bad": bad}


def harmful(about: dict[str, Any], outcome: str, said: str) -> bool:
    """Whether an outcome violates the promise; under the manifest of the save, a changed file must not load at all."""
    if outcome == OUTCOMES[REFUSED]:
        return not said or "\n" in said
    slipped_through = about["manifest"] == "as saved" and about["file"] != MANIFEST
    return outcome != OUTCOMES[LOADED] or slipped_through


def main() -> int:
    """Run the mutations, print counts, write the results; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fuzz the bytes of a checkpoint; each must be refused or harmless.")
    parser.add_argument("--n", type=int, default=1000, help="number of mutations; default: 1000")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations; default: 0")
    args = parser.parse_args()
    from bench import results

    began = time.monotonic()
    found = run(args.n, args.seed)
    path = results.write("mutations", {**found, "seconds": round(time.monotonic() - began, 1)})
    for outcome, number in found["outcomes"].items():
        print(f"{number:6}  {outcome}")
    print(f"{len(found['bad'])} of {args.n} neither refused nor harmless; {path}")
    return 1 if found["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
