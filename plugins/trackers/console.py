"""One line on stderr per logged row; on a terminal also a progress bar with the time left.

    step 20/600  loss 5.1234  grad norm 1.234  lr 3.0e-03  12.3k tokens/s  mfu -  0.100 s/step  71.3 GiB  left 00:58

The memory is that of the rank with the highest peak, which is named if it is not rank 0: `71.3 GiB (rank 9)`.

Cost: some microseconds per row; the bar redraws at most ten times per second.
Limits: while the bar is shown, output of other code must go through logging, or it breaks the bar.
"""

import logging
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from titan.contracts import Row, RunInfo, Tracker, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[metrics.console]`: none besides `enabled`."""


@register
class Console(Tracker):
    """One line per row on stderr; on a terminal, a progress bar too."""

    name = "console"
    Config = Config
    default = True

    _steps = 0
    _measures: tuple[str, ...] = ()
    _bar: "tqdm[Any] | None" = None
    _redirected: ExitStack

    def start(self, info: RunInfo) -> None:
        """Draw the bar, if stderr is a terminal."""
        self._steps, self._measures, self._redirected = info.steps, info.measures, ExitStack()
        if sys.stderr.isatty():
            self._bar = tqdm(total=info.steps, initial=info.start_step, unit="step", desc=info.name, dynamic_ncols=True)
            self._redirected.enter_context(logging_redirect_tqdm([logging.getLogger("titan")]))

    def log(self, row: Row) -> None:
        validation = row.get("validation_loss") is not None
        line = f"step {row['step']}/{self._steps}  " + (_validation(row) if validation else self._training(row))
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def _training(self, row: Row) -> str:
        parts = [_training(row, self._steps)]
        parts += [f"{name} {value:.4g}" for name in self._measures if (value := row.get(name)) is not None]
        return "  ".join(parts)

    def progress(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands, and the terminal to others."""
        if self._bar is not None:
            self._redirected.close()
            self._bar.close()
            self._bar = None


def _training(row: Row, steps: int) -> str:
    memory, time = row.get("peak_memory_gib"), row.get("step_time_s")
    parts = [
        f"loss {_shown(row.get('loss'), '.4f')}",
        f"grad norm {_shown(row.get('grad_norm'), '.3f')}",
        f"lr {_shown(row.get('lr'), '.1e')}",
        f"{_thousands(row.get('tokens_per_s'))} tokens/s",
        f"mfu {_shown(row.get('mfu'), '.1%')}",
        f"{_shown(time, '.3f')} s/step",
    ]
    if memory is not None:
        rank = row.get("peak_memory_rank")
        parts.append(f"{memory:.1f} GiB" + (f" (rank {rank})" if rank else ""))
    if time is not None:
        parts.append(f"left {tqdm.format_interval((steps - (row['step'] or 0)) * time)}")
    return "  ".join(parts)


def _validation(row: Row) -> str:
    loss, perplexity = _shown(row["validation_loss"], ".4f"), _shown(row.get("validation_perplexity"), ".4g")
    return f"validation loss {loss}  perplexity {perplexity}"


def _shown(value: float | int | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _thousands(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value < 1000 else f"{value / 1000:.1f}k"
