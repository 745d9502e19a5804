"""Steps to the same loss, relative to another run: as a user gives them, or from the losses of runs in a file.

Such a file is JSON with a table `runs`: name -> `loss`, that of each step in order, and `baseline`, the name of the run
that it is compared with. `python -m bench.comm` writes one. Losses are smoothed, as those of single steps scatter:

    smoothed loss after step s = mean of the last tenth of all steps up to s
    ratio = steps of the run / steps of its baseline, each to the lowest smoothed loss that both reach
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from titan.contracts.plugin.options import did_you_mean
from titan.errors import ConfigError


def steps_ratios(words: Sequence[str], file: Path | None, names: Sequence[str]) -> dict[str, float]:
    """Name of a job -> its steps ratio, for those that have one.

    words: `NAME=R`, with a number or, if there is a file, the name of one of its runs.  file: of runs; one that has the
    name of a job is that job's, unless a word says otherwise.  names: of the jobs.

    Raises:
        ConfigError: a word is no such pair, the file cannot be read, or no job has a ratio from it.
    """
    measured = {} if file is None else read(file)
    found = {name: measured[name] for name in names if name in measured}
    if file is not None and not found and not words:
        what = f"{file} has no run named {' or '.join(names)}; say --steps-ratio NAME=RUN with one of its runs: "
        raise ConfigError(what + ", ".join(measured), "--steps-ratios")
    return found | dict(_pair(word, measured) for word in words)


def read(file: Path) -> dict[str, float]:
    """Run -> its steps ratio.

    Raises:
        ConfigError: the file cannot be read, or lacks losses of a run.
    """
    try:
        runs: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["runs"]
        return {name: _ratio(run["loss"], runs[run["baseline"]]["loss"]) for name, run in runs.items()}
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", "--steps-ratios") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{file}: expected JSON with runs, each with a baseline among them and the loss of each step"
        raise ConfigError(f"{what} ({type(error).__name__}: {error})", "--steps-ratios") from error


def _ratio(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """Steps to the lowest smoothed loss that both reach, over those of the baseline, in three digits."""
    own, theirs = _smoothed(losses), _smoothed(baseline)
    reached = max(min(own.values()), min(theirs.values()))
    steps, of = (next(step for step, loss in each.items() if loss <= reached) for each in (own, theirs))
    return float(f"{steps / of:.3g}")


def _smoothed(losses: Sequence[float]) -> dict[int, float]:
    """Step -> the mean of the losses of a tenth of all steps, up to it."""
    if not losses or not all(math.isfinite(loss) for loss in losses):
        raise ValueError("a run without losses, or with one that is no finite number")
    size, sums = max(1, len(losses) // 10), [0.0, *accumulate(losses)]
    return {step: (sums[step] - sums[step - size]) / size for step in range(size, len(losses) + 1)}


def _pair(word: str, measured: Mapping[str, float]) -> tuple[str, float]:
    """The name and the ratio of `NAME=R`."""
    name, _, value = word.partition("=")
    if value in measured:
        return name, measured[value]
    try:
        ratio = float(value)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < math.inf:
        what = f"--steps-ratio {word}: must be NAME=R with a number above 0, such as diloco=1.08"
        if measured:
            what += f", or a run of --steps-ratios{did_you_mean(value, measured)}"
        raise ConfigError(what, "command line")
    return name, ratio
