"""Whether a drawn job keeps the rule: refused in words, or the same curve as on one rank."""

import contextlib
import io
import random
import shlex
import shutil
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.fuzz import savings
from tests.fuzz.draw import Drawn, words
from tests.fuzz.plugins.digits import END
from titan.config import load_job
from titan.data.tokens.shards import ShardWriter
from titan.errors import ConfigError
from titan.testing.jobs import Outcome, deviations, differences, train_job

JOB = Path(__file__).with_name("job.toml")
TOKENS = 2000
"""Of a data set, at least: less than the largest jobs use, so that some meet a second epoch."""

MOST = 12
"""Differences that are told of a job; with one there are often as many as weights."""


@dataclass(frozen=True)
class Verdict:
    """What became of a job. reason: why it was refused, or what went wrong. worst: see `jobs.deviations`."""

    kind: Literal["agreed", "refused", "failed"]
    reason: str = ""
    worst: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Judge:
    """Judges jobs, with data, references and runs under `folder`. Jobs of the same curve share a reference."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[str, Outcome] = {}

    def judge(self, drawn: Drawn) -> Verdict:
        """Refuse or train, and compare."""
        began = time.perf_counter()
        verdict = self.refused(drawn) or self._trained(drawn)
        return Verdict(verdict.kind, verdict.reason, verdict.worst, time.perf_counter() - began)

    def command(self, drawn: Drawn) -> str:
        """The command line that trains it."""
        given = shlex.join(["--config", str(JOB), "--run.dir", f"{self.folder}/runs", *self.words(drawn)])
        return f"NPROC={drawn.ranks} titan train {given}"

    def words(self, drawn: Drawn) -> list[str]:
        """The job as words of a command line."""
        return self._curve(drawn.curve) + words(drawn.layout)

    def _curve(self, curve: Mapping[str, Any]) -> list[str]:
        """With the folder of the data in place of its kind."""
        vocabulary = curve["model.vocab_size"]
        keys = {**curve, "data.path": self._data(curve["data.path"], vocabulary)}
        if "validation.every" in curve:
            keys["validation.path"] = self._data("lively", vocabulary)
        return words(keys)

    def _data(self, kind: str, vocabulary: int) -> Path:
        folder = self.folder / f"{kind}-{vocabulary}"
        if not folder.exists():
            write_documents(folder, kind, vocabulary)
        return folder

    def refused(self, drawn: Drawn) -> Verdict | None:
        """What `load_job` says to it, unless it takes it.

        A job that is meant to be legal must not be refused.
        """
        try:
            load_job(JOB, self.words(drawn), drawn.ranks)
        except ConfigError as error:
            return Verdict("refused" if drawn.spoilt else "failed", str(error))
        except Exception:
            return Verdict("failed", f"load_job raised\n{traceback.format_exc()}")
        return None

    def _trained(self, drawn: Drawn) -> Verdict:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                reference = self._reference(drawn.curve)
                outcome = self._train(drawn.ranks, self.words(drawn), f"job-{drawn.index}")
        except AssertionError as error:  # a rank raised or hung, or ranks disagree
            return Verdict("failed", str(error))
        bounds = savings.BOUNDS[savings.arithmetic(drawn.curve)]
        if found := differences(reference, outcome, bounds):
            return Verdict("failed", "\n".join(found[:MOST]))
        apart = deviations(reference, outcome)
        return Verdict("agreed", "", {key: apart[key] for key in apart if bounds is None or key != "weights"})

    def _reference(self, curve: Mapping[str, Any]) -> Outcome:
        given = self._curve(curve)
        key = " ".join(given)
        if key not in self._references:
            self._references[key] = self._train(1, given, "reference")
        return self._references[key]

    def _train(self, ranks: int, given: list[str], name: str) -> Outcome:
        try:
            return train_job(self.folder, ranks, *given, config=JOB, name=name)
        finally:
            shutil.rmtree(self.folder / name, ignore_errors=True)


def write_documents(folder: Path, kind: str, vocabulary: int) -> None:
    """Two shards of documents of uneven length, each token below `vocabulary`.

    barren: between them lie stretches of documents of one token, of which a sample, a micro batch or a whole step can
    be full. Where documents do not see each other, nothing can be learnt from those.
    """
    folder.mkdir(parents=True)
    rng = random.Random(f"{kind}/{vocabulary}")
    for number in range(2):
        with ShardWriter(folder / f"{number}.bin", vocabulary) as shard:
            while shard.tokens < TOKENS / 2:
                shard.add([*(rng.randrange(vocabulary) for _ in range(rng.randint(1, 60))), END])
                for _ in range(rng.choice((0, 0, 20, 80)) if kind == "barren" else 0):
                    shard.add([END])
