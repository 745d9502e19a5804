"""Injects faults into runs again and again, lets them go on, and holds what they leave against undisturbed runs.

`Hunt` does it: a small run is started, meets a fault at a chosen moment, is started again with the same command (on
another layout, in half of the runs), and so on until it is through. A fault is a kill -9, an error of the file system,
something that cannot be removed, a second start of the same command, a corpus that grows while it is read, or a clock
that jumps (`tests.injection.Fault`). What has to hold:

- a checkpoint that was complete, or was said to be saved, is never lost; every start goes on from the newest;
- metrics.jsonl is valid after every fault, and holds the curve of an undisturbed run in the end: the very same numbers
  on one layout, those within the tolerance table on changing ones; so do the weights, the optimizer's state included;
  rows may lack where the file system refused them, and then a warning says so;
- an error of the file system ends a run with exit code 1, if at all; a second start is refused; a corpus that grows is
  refused; neither a clock nor what cannot be removed ends a run;
- nothing half written is left when the run is through.

A run is started in one of three ways: its ranks alone, which die together; ranks under a launcher, which outlives them
or is killed itself; the command as a user types it. Moments are counted in events (tests/plugins/fault_injector.py).
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.chaos_starts import COMMAND, LAYOUTS, RANKS, Start, drawn_start, flag, layouts_of_starts, with_caches
from tests.injection import ERRORS, NEVER, Fault, Witness, witnessed
from tests.jobs import LLAMA
from titan.checkpoint.disk import folder as folders
from titan.ranks import launcher, rank_processes
from titan.ranks.meeting.launch_env import LOCAL, LaunchEnv
from titan.ranks.meeting.same_job import Statement
from titan.testing.jobs import Outcome, differences, read_rows, run_job, saved_tensors, write_text
from titan.testing.ranks import RankError, run_ranks

ROOT = Path(__file__).parents[1]
STEPS = 12
FAULTS_A_RUN = 5
MOST_VIOLATIONS = 20
PATIENCE_S = 200.0

IN_USE = "is in use"
CHANGED, CHANGED_CODE = "changed while", 2
"""What is said of a second start, and of a corpus that grows."""

GAP = r"\[metrics\.jsonl\] .* misses some rows"
ASIDE = r"^(put|fsync) .*/(metrics\.jsonl|logs/[^/]*|lock\.json)$"
"""Errors there cost rows, words or counts, never the run."""


@dataclass(frozen=True)
class End:
    """How a start ended. struck: what the fault met, a line each.  code: of the run; -1 where its ranks had none."""

    struck: tuple[str, ...]
    code: int
    said: str


@dataclass
class Report:
    """What a hunt saw. struck: faults that were met, a table each.  violations: what did not hold, a sentence each."""

    struck: list[dict[str, Any]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    runs: int = 0
    starts: int = 0


Entry = Callable[[str, list[str], str], Any]


class Hunt:
    """Runs under one folder, and the undisturbed ones they are held against.

    entry: what a rank runs when its run is started by its ranks alone.  told: called after every start.
    """

    def __init__(self, folder: Path, entry: Entry = run_job, told: Callable[[], Any] = lambda: None) -> None:
        self.folder, self.entry, self.told = folder, entry, told
        self.report = Report()
        self._references: dict[str, Outcome] = {}
        write_text(folder / "text")

    def hunt(self, faults: int, seed: int) -> Report:
        """Run after run, until so many faults have struck. What is tried depends on the seed alone."""
        self.report = Report()
        while len(self.report.struck) < faults and len(self.report.violations) < MOST_VIOLATIONS:
            self.run(random.Random(f"{seed} {self.report.runs}"), faults - len(self.report.struck))
        return self.report

    def run(self, rng: random.Random, faults: int) -> None:
        """One run, with up to `FAULTS_A_RUN` faults."""
        layouts = layouts_of_starts(rng)
        saving = flag("checkpoint.every", rng.choice((1, 1, 2)))
        saving += flag("checkpoint.async", rng.choice(("true", "false")))
        rewritten = 0
        if rng.random() < 0.15:
            rewritten = STEPS // 2
            saving += flag("checkpoint.keep_latest", 0)
        starts = [drawn_start(rng, next(layouts), saving) for _ in range(min(faults, FAULTS_A_RUN))]
        if rewritten:
            # A run that begins again under its old name replaces the checkpoints it finds.
            before = replace(starts[0], way=RANKS, fault=NEVER, words=(*saving, *flag("train.steps", rewritten)))
            anew = (*saving, *flag("checkpoint.resume", "never"))
            starts[0] = replace(starts[0], fault=Fault("rename", rng.randint(1, 12), 0), words=anew)
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
        gaps = 0
        for number, start in enumerate(with_caches(starts, f"{self.folder}/cache-{name}")):
            layouts.add(start.layout)
            lines = _lines(run)
            end = self._once(name, start)
            self.report.starts += 1
            self.told()
            if end.code and not end.struck:
                self.report.violations.append(f"{name}, start {number}: failed without a fault: {end.said[-3000:]}")
                break
            told = f"{name}, start {number} ({start.layout}, {start.way}, {start.fault.kind})"
            self.check_end_of_start(told, start.fault, end)
            self._check_start(told, start, _lines(run)[len(lines) :], there)
            there = self._check_folder(told, run)
            ever |= set(there)
            lost = [path for path in sorted(ever) if start.keeps_all and not _is_there(path)]
            self.report.violations += [f"{told}: {path} was there once and is lost" for path in lost]
            gaps += _lost_rows(end)
            if end.struck:
                newest = there[-1].name if there else ""
                about = {"run": name, "start": number, "layout": start.layout, "way": start.way, "code": end.code}
                met = {"struck": end.struck[0][:300], "events": len(end.struck), "newest": newest}
                self.report.struck.append({**about, **asdict(start.fault), **met})
            elif start.fault != NEVER or number == len(starts) - 1:
                self._check_end(name, run, layouts, rewritten, gaps)
                break
        for path in (run, *self.folder.glob(f"cache-{name}-*")):
            shutil.rmtree(path, ignore_errors=True)
        return self.report

    # --- one start ------------------------------------------------------------------------------------------------

    def _once(self, name: str, start: Start) -> End:
        ranks, axes = LAYOUTS[start.layout]
        note, pipe, corpus = self.folder / "note", self.folder / "pipe", self.folder / "text"
        for path in (note, pipe):
            path.unlink(missing_ok=True)
        words = ["--run.name", name, "--data.path", str(corpus), "--train.steps", str(STEPS)]
        words += ["--checkpoint.enabled", "true", "--plugins.path", json.dumps([str(ROOT / "tests" / "plugins")])]
        words += ["--plugins.fault_injector.enabled", "true"]
        words += [*(word for axis in axes for word in flag(f"mesh.{axis}", 2)), *start.words]
        places = {"folder": self.folder / name, "corpus": corpus, "note": note, "pipe": pipe}
        again = [sys.executable, "-m", "titan.launch", *_command(self.folder, words)]
        plan = {**{key: str(path) for key, path in places.items()}, "again": again, **asdict(start.fault)}
        with witnessed(pipe, note, start.fault) as witness, _kept(corpus):
            code, said = self._started(start.way, ranks, words, {"CHAOS": json.dumps(plan)}, witness)
        return End(tuple(note.read_text().splitlines()) if note.exists() else (), code, said)

    def _started(
        self, way: str, ranks: int, words: list[str], environment: dict[str, str], witness: Witness
    ) -> tuple[int, str]:
        """Exit code of the run, and what it said."""
        if way == COMMAND:
            return self._typed(ranks, words, environment, witness)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                if way == RANKS:
                    call = (self.entry, environment, str(self.folder), words, str(LLAMA))
                    run_ranks(_as_ranks, ranks, *call, init=False, timeout=PATIENCE_S)
                    return 0, ""
                call = (_command(self.folder, words), environment, ranks)
                [code] = run_ranks(_under_a_launcher, 1, *call, init=False, timeout=PATIENCE_S)
            return code, said.getvalue()
        except RankError as error:
            return -1, f"{error}\n{said.getvalue()}"

    def _typed(self, ranks: int, words: list[str], environment: dict[str, str], witness: Witness) -> tuple[int, str]:
        command = [sys.executable, "-m", "titan.launch", *_command(self.folder, words)]
        surroundings = {**os.environ, **environment, "NPROC": str(ranks), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=surroundings, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        witness.launcher = process.pid
        _, said = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    # --- what has to hold -----------------------------------------------------------------------------------------

    def check_end_of_start(self, told: str, fault: Fault, end: End) -> None:
        """The run ended as it should after that fault."""
        if "did not end within" in end.said:
            self.report.violations.append(f"{told}: hung: {end.said[-3000:]}")
        if not end.struck or fault.kind == "kill":
            return
        if fault.kind == "growth":
            right = end.code == CHANGED_CODE and re.search(CHANGED, end.said) is not None
        elif fault.kind == "second":
            right = end.code == 0 and re.search(rf"exit code 2: .*{IN_USE}", end.struck[0]) is not None
        elif fault.kind in ERRORS and not all(re.search(ASIDE, line) for line in end.struck):
            right = end.code in (0, 1)
        else:
            right = end.code == 0
        if _lost_rows(end) and end.code == 0:
            right &= re.search(GAP, end.said) is not None
        if not right or "Traceback" in end.said:
            met = "; ".join(end.struck[:3])
            self.report.violations.append(f"{told}: {met}: exit code {end.code}: {end.said[-3000:]}")

    def _check_start(self, told: str, start: Start, lines: list[str], there: list[Path]) -> None:
        """Every start that came so far went on from the newest checkpoint."""
        if "never" in start.words:
            return
        begun = [match[1] for line in lines if (match := re.search(r"weights: (new|from \S+),", line))]
        right = f"from {there[-1]}" if there else "new"
        if begun and begun != [right]:
            self.report.violations.append(f"{told}: its weights are {begun[0]}, should be {right}")

    def _check_folder(self, told: str, run: Path) -> list[Path]:
        """The complete checkpoints; what was last said to be saved is among them, and the metrics are whole."""
        # Also those of a branch that a start anew has abandoned: killed after its first save, it has not told of it.
        found = folders.sound(folders.survey(run / "checkpoints", sizes=False))
        saved = [int(match[1]) for line in _lines(run) if (match := re.search(r"checkpoint: step (\d+) saved", line))]
        if saved and folders.step_folder(run / "checkpoints", saved[-1]) not in found:
            self.report.violations.append(f"{told}: step {saved[-1]} was said to be saved; there are {found}")
        metrics = run / "metrics.jsonl"
        for line in metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []:
            try:
                assert line.endswith(b"\n")
                json.loads(line)
            except (ValueError, AssertionError):
                self.report.violations.append(f"{told}: metrics.jsonl holds {line!r}")
        return found

    def _check_end(self, name: str, run: Path, layouts: set[str], rewritten: int, gaps: int) -> None:
        """The run left what an undisturbed one leaves; it may lack so many rows."""
        left = sorted(str(path.relative_to(run)) for pattern in ("*.tmp", "lock.json*") for path in run.rglob(pattern))
        if left:
            self.report.violations.append(f"{name}: {', '.join(left)} left at the end")
        if folders.complete(run / "checkpoints")[-1:] != [folders.step_folder(run / "checkpoints", STEPS)]:
            self.report.violations.append(f"{name}: the checkpoint of step {STEPS} is not there at the end")
            return
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        if steps != sorted(set(steps)):
            self.report.violations.append(f"{name}: metrics.jsonl has the steps {steps}")
        same = len(layouts) == 1
        reference = self.reference(min(layouts) if same else "one rank")
        outcome = _outcome(run)
        needed = {step for step in reference.rows if step > rewritten} | outcome.rows.keys()
        if len(lacking := needed - outcome.rows.keys()) <= gaps:
            needed -= lacking
        rows = {step: row for step, row in reference.rows.items() if step in needed}
        reference = Outcome(rows, reference.weights)
        found = _unequal(reference, outcome) if same else differences(_weights_only(reference), _weights_only(outcome))
        where = f"{name} ({', '.join(sorted(layouts))})"
        self.report.violations += [f"{where}: {line}" for line in [*found[:3], *found[3:][-2:]]]

    def reference(self, layout: str) -> Outcome:
        """What an undisturbed run leaves."""
        if layout not in self._references:
            name = f"whole, {layout}"
            end = self._once(name, Start(layout, RANKS, NEVER))
            assert not end.struck and not end.code, end.said
            self._references[layout] = _outcome(self.folder / name)
        return self._references[layout]


def _lost_rows(end: End) -> int:
    """Rows that the file system has refused to take."""
    return sum(re.search(r"^put .*/metrics\.jsonl$", line) is not None for line in end.struck)


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """What is done to the files of a folder is undone, times included."""
    before = {path: (path.read_bytes(), path.stat()) for path in folder.iterdir()}
    yield
    for path, (data, status) in before.items():
        if path.stat().st_size != status.st_size:
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


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
    found = differences(reference, other, rows_only=dict.fromkeys(("loss", "grad_norm", "lr"), 0.0))
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
    rank_processes.GRACE_S = 2.0
    return launcher.start(main, argv, LaunchEnv(1, 0, ranks, LOCAL, 0), Statement())
