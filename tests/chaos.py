"""Kills runs again and again, lets them go on, and holds what they leave against runs that nobody touched.

`Hunt` does it: a small run is started, dies of a kill -9 at a chosen moment, is started again with the same command (on
another layout, in half of the runs), and so on until it is through. What has to hold:

- a checkpoint that was complete, or was said to be saved, is never lost; every start goes on from the newest;
- metrics.jsonl is valid after every kill, and holds the curve of an uninterrupted run in the end: the very same numbers
  on one layout, those within the tolerance table on changing ones; so do the weights, the optimizer's state included;
- nothing half written is left when the run is through.

A run is started in one of three ways: its ranks alone, which die together; ranks under a launcher, which outlives them
or is killed itself; the command as a user types it. Moments are counted in events (tests/guests/saboteur.py).
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tests.jobs import LLAMA, Outcome, differences, read_rows, run_job, saved_tensors, write_text
from tests.kills import NEVER, Kill, Witness, witnessed
from tests.ranks import ROOT, RankError, run_ranks
from titan.checkpoint.disk import folder as folders
from titan.ranks import children, launcher
from titan.ranks.place import LOCAL, Place

STEPS = 12
KILLS_A_RUN = 5
MOST_FAULTS = 20
PATIENCE_S = 200.0

LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "dp_shard 2": (2, ("dp_shard",)),
    "dp_replicate 2": (2, ("dp_replicate",)),
    "tp 2": (2, ("tp",)),
    "pp 2": (2, ("pp",)),
    "dp_shard 2, tp 2": (4, ("dp_shard", "tp")),
    "dp_shard 2, pp 2": (4, ("dp_shard", "pp")),
}
OFTEN = (4, 4, 2, 3, 3, 1, 1)
"""How often each layout is taken, against the others: four ranks cost most."""

MOMENTS = {"step": 28, "mkdir": 6, "write": 14, "fsync": 14, "cut": 14, "rename": 9, "remove": 24, "read": 9}
"""Latest event of each kind that a kill waits for."""

RANKS, LAUNCHER, COMMAND = "ranks", "launcher", "command"
"""Ways to start a run."""


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    layout: str
    way: str
    kill: Kill
    words: tuple[str, ...] = ()

    @property
    def keeps_all(self) -> bool:
        """Whether the run never removes a checkpoint."""
        return any(pair == ("--checkpoint.keep", "0") for pair in pairwise(self.words))


@dataclass
class Report:
    """What a hunt saw. kills: one table each. faults: what did not hold, a sentence each."""

    kills: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    runs: int = 0
    starts: int = 0


Entry = Callable[[str, list[str], str], Any]


class Hunt:
    """Runs under one folder, and the uninterrupted ones they are held against.

    entry: what a rank runs when its run is started by its ranks alone.  told: called after every start.
    """

    def __init__(self, folder: Path, entry: Entry = run_job, told: Callable[[], Any] = lambda: None) -> None:
        self.folder, self.entry, self.told = folder, entry, told
        self.report = Report()
        self._references: dict[str, Outcome] = {}
        write_text(folder / "text")

    def hunt(self, kills: int, seed: int) -> Report:
        """Run after run, until so many kills have struck. What is tried depends on the seed alone."""
        self.report = Report()
        while len(self.report.kills) < kills and len(self.report.faults) < MOST_FAULTS:
            self.run(random.Random(f"{seed} {self.report.runs}"), kills - len(self.report.kills))
        return self.report

    def run(self, rng: random.Random, kills: int) -> None:
        """One run, killed up to `KILLS_A_RUN` times."""
        layouts = _layouts(rng)
        saving = [
            *_flag("checkpoint.every", rng.choice((1, 1, 2))),
            *_flag("checkpoint.async", rng.choice(("true", "false"))),
        ]
        rewritten = 0
        if rng.random() < 0.15:
            rewritten = STEPS // 2
            saving += _flag("checkpoint.keep", 0)
        starts = [_start(rng, next(layouts), saving) for _ in range(min(kills, KILLS_A_RUN))]
        if rewritten:
            # A run that begins again under its old name replaces the checkpoints it finds.
            before = replace(starts[0], way=RANKS, kill=NEVER, words=(*saving, *_flag("train.steps", rewritten)))
            anew = (*saving, *_flag("checkpoint.resume", "never"))
            starts[0] = replace(starts[0], kill=Kill("rename", rng.randint(1, 12), 0), words=anew)
            starts.insert(0, before)
        self.chase([*starts, Start(next(layouts), RANKS, NEVER, tuple(saving))], rewritten)

    def chase(self, starts: list[Start], rewritten: int = 0) -> Report:
        """One run through these starts, until one with a plan is not struck.

        rewritten: it begins anew over so many steps of its own, whose rows need not be there in the end.
        """
        self.report.runs += 1
        name = f"run-{self.report.runs}"
        run = self.folder / name
        there: list[Path] = []
        ever: set[Path] = set()
        layouts = set()
        for number, start in enumerate(starts):
            layouts.add(start.layout)
            lines = _lines(run)
            struck, failure = self._once(name, start)
            self.report.starts += 1
            self.told()
            if failure and not struck:
                self.report.faults.append(f"{name}, start {number}: failed without a kill: {failure[-3000:]}")
                break
            told = f"{name}, start {number} ({start.layout}, {start.way})"
            self._check_start(told, start, _lines(run)[len(lines) :], there)
            there = self._check_folder(told, run)
            ever |= set(there)
            lost = [path for path in sorted(ever) if start.keeps_all and not _is_there(path)]
            self.report.faults += [f"{told}: {path} was there once and is lost" for path in lost]
            if struck:
                newest = there[-1].name if there else ""
                about = {"run": name, "start": number, "layout": start.layout, "way": start.way}
                self.report.kills.append({**about, **asdict(start.kill), "struck": struck, "newest": newest})
            elif start.kill != NEVER or start is starts[-1]:
                self._check_end(name, run, layouts, rewritten)
                break
        shutil.rmtree(run, ignore_errors=True)
        return self.report

    # --- one start ------------------------------------------------------------------------------------------------

    def _once(self, name: str, start: Start) -> tuple[str, str]:
        """(what was struck, what was said of a failure); each empty if there was none."""
        ranks, axes = LAYOUTS[start.layout]
        note, pipe = self.folder / "note", self.folder / "pipe"
        for path in (note, pipe):
            path.unlink(missing_ok=True)
        plan = {"folder": str(self.folder / name), "note": str(note), "pipe": str(pipe), **asdict(start.kill)}
        words = [
            "--run.name", name, "--data.path", str(self.folder / "text"), "--train.steps", str(STEPS),
            "--checkpoint.enabled", "true", "--plugins.path", json.dumps([str(ROOT / "tests" / "guests")]),
            "--plugins.saboteur.enabled", "true", *(word for axis in axes for word in _flag(f"mesh.{axis}", 2)),
            *start.words,
        ]  # fmt: skip
        with witnessed(pipe, note, start.kill) as witness:
            failure = self._started(start.way, ranks, words, {"CHAOS": json.dumps(plan)}, witness)
        return note.read_text() if note.exists() else "", failure

    def _started(self, way: str, ranks: int, words: list[str], environment: dict[str, str], witness: Witness) -> str:
        if way == COMMAND:
            return self._typed(ranks, words, environment, witness)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                if way == RANKS:
                    call = (self.entry, environment, str(self.folder), words, str(LLAMA))
                    run_ranks(_as_ranks, ranks, *call, init=False, timeout=PATIENCE_S)
                    return ""
                call = (_command(self.folder, words), environment, ranks)
                [code] = run_ranks(_under_a_launcher, 1, *call, init=False, timeout=PATIENCE_S)
            return f"exit code {code}\n{said.getvalue()}" if code else ""
        except RankError as error:
            return f"{error}\n{said.getvalue()}"

    def _typed(self, ranks: int, words: list[str], environment: dict[str, str], witness: Witness) -> str:
        command = [sys.executable, "-m", "titan.launch", *_command(self.folder, words)]
        surroundings = {**os.environ, **environment, "NPROC": str(ranks), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=surroundings, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        witness.launcher = process.pid
        _, said = process.communicate(timeout=PATIENCE_S)
        return "" if process.returncode == 0 else f"exit code {process.returncode}\n{said}"

    # --- what has to hold -----------------------------------------------------------------------------------------

    def _check_start(self, told: str, start: Start, lines: list[str], there: list[Path]) -> None:
        """Every start that came so far went on from the newest checkpoint."""
        if "never" in start.words:
            return
        begun = [match[1] for line in lines if (match := re.search(r"weights: (new|from \S+),", line))]
        right = f"from {there[-1]}" if there else "new"
        if begun and begun != [right]:
            self.report.faults.append(f"{told}: its weights are {begun[0]}, should be {right}")

    def _check_folder(self, told: str, run: Path) -> list[Path]:
        """The complete checkpoints; what was last said to be saved is among them, and the metrics are whole."""
        found = folders.complete(run / "checkpoints")
        saved = [int(match[1]) for line in _lines(run) if (match := re.search(r"checkpoint: step (\d+) saved", line))]
        if saved and folders.step_folder(run / "checkpoints", saved[-1]) not in found:
            self.report.faults.append(f"{told}: step {saved[-1]} was said to be saved; there are {found}")
        metrics = run / "metrics.jsonl"
        for line in metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []:
            try:
                assert line.endswith(b"\n")
                json.loads(line)
            except (ValueError, AssertionError):
                self.report.faults.append(f"{told}: metrics.jsonl holds {line!r}")
        return found

    def _check_end(self, name: str, run: Path, layouts: set[str], rewritten: int) -> None:
        """The run that was killed left what an uninterrupted one leaves."""
        left = sorted(str(path.relative_to(run)) for path in run.rglob("*.tmp"))
        if left:
            self.report.faults.append(f"{name}: {', '.join(left)} left at the end")
        if folders.complete(run / "checkpoints")[-1:] != [folders.step_folder(run / "checkpoints", STEPS)]:
            self.report.faults.append(f"{name}: the checkpoint of step {STEPS} is not there at the end")
            return
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        if steps != sorted(set(steps)):
            self.report.faults.append(f"{name}: metrics.jsonl has the steps {steps}")
        same = len(layouts) == 1
        reference = self.reference(min(layouts) if same else "one rank")
        rows = {step: row for step, row in reference.rows.items() if step > rewritten or step in read_rows(run)}
        reference, outcome = Outcome(rows, reference.weights), _outcome(run)
        found = _unequal(reference, outcome) if same else differences(_weights_only(reference), _weights_only(outcome))
        self.report.faults += [f"{name} ({', '.join(sorted(layouts))}): {line}" for line in found]

    def reference(self, layout: str) -> Outcome:
        """What a run leaves that nobody kills."""
        if layout not in self._references:
            name = f"whole, {layout}"
            struck, failure = self._once(name, Start(layout, RANKS, NEVER))
            assert not struck and not failure, failure
            self._references[layout] = _outcome(self.folder / name)
        return self._references[layout]


def _layouts(rng: random.Random) -> Iterator[str]:
    """The layout of each start: one for all, or another each time."""
    fixed = rng.random() < 0.5
    while True:
        layout = rng.choices(list(LAYOUTS), OFTEN)[0]
        yield layout
        while fixed:
            yield layout


def _start(rng: random.Random, layout: str, words: list[str]) -> Start:
    way = rng.choices((RANKS, LAUNCHER, COMMAND), (7, 2, 1))[0]
    ranks = LAYOUTS[layout][0]
    if rng.random() < 0.25:
        victims = ("rank", "all") if way != COMMAND else ("rank", "launcher", "all")
        kill = Kill("outside", rng.randint(1, 150 * ranks), rng.randrange(ranks), rng.choice(victims), slow=0.003)
    else:
        point = rng.choice(list(MOMENTS))
        # Rank 0 alone makes, renames and removes folders.
        rank = 0 if point in ("mkdir", "rename", "remove") else rng.randrange(ranks)
        launched = way == LAUNCHER or (way == COMMAND and ranks > 1)
        victim = rng.choice(("rank", "launcher")) if launched else "rank"
        kill = Kill(point, rng.randint(1, MOMENTS[point]), rank, victim, rng.choice((0.0, 0.003)))
    return Start(layout, way, kill, tuple(words))


def _flag(key: str, value: object) -> list[str]:
    return [f"--{key}", str(value)]


def _lines(run: Path) -> list[str]:
    log = run / "logs" / "rank-0.log"
    return log.read_text().splitlines() if log.exists() else []


def _is_there(checkpoint: Path) -> bool:
    """Whether it stands under its name, or aside while a new one takes its place."""
    return folders.is_complete(checkpoint) or checkpoint.with_name(f"{checkpoint.name}.replaced.tmp").is_dir()


def _outcome(run: Path) -> Outcome:
    return Outcome(read_rows(run), saved_tensors(folders.step_folder(run / "checkpoints", STEPS)))


def _weights_only(outcome: Outcome) -> Outcome:
    return Outcome(outcome.rows, {name: t for name, t in outcome.weights.items() if name.startswith("model.")})


def _unequal(reference: Outcome, other: Outcome) -> list[str]:
    """What is not the very same, a line each."""
    found = []
    if reference.rows.keys() != other.rows.keys():
        found.append(f"steps {sorted(reference.rows)} against {sorted(other.rows)}")
    for step in reference.rows.keys() & other.rows.keys():
        for key in ("loss", "grad_norm", "lr", "tokens"):
            ours, theirs = reference.rows[step][key], other.rows[step][key]
            if ours != theirs:
                found.append(f"step {step}: {key} {ours} against {theirs}")
    # Each rank's own generators stand in the rest; nothing of a run depends on them but through the curve.
    ours, theirs = ({n: t for n, t in o.weights.items() if not n.startswith("rest.")} for o in (reference, other))
    if ours.keys() != theirs.keys():
        found.append(f"tensors differ: {sorted(ours.keys() ^ theirs.keys())}")
    unlike = [name for name in sorted(ours.keys() & theirs.keys()) if not torch.equal(ours[name], theirs[name])]
    return found + [f"{name} differs" for name in unlike]


# --- in a process of the run --------------------------------------------------------------------------------------


def _command(folder: Path, words: list[str]) -> list[str]:
    return ["--config", str(LLAMA), "--run.dir", str(folder), "--data.cache", f"{folder}/cache", *words]


def _as_ranks(entry: Entry, environment: dict[str, str], folder: str, words: list[str], config: str) -> None:
    os.environ.update(environment)
    entry(folder, words, config)


def _under_a_launcher(argv: list[str], environment: dict[str, str], ranks: int) -> int:
    """The launcher, in a process that has imported everything; the exit code of the run."""
    from titan.train import main

    os.environ.update(environment)
    children.GRACE_S = 2.0
    return launcher.start(main, argv, Place(1, 0, ranks, LOCAL, 0))
