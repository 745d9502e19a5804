"""Metrics as a run of Weights & Biases (wandb.ai, or a server of your own), enabled by the table `[metrics.wandb]`.

    [metrics.wandb]
    project = "llama"
    mode = "offline"      # nothing leaves the machine; `wandb sync runs/NAME/wandb/offline-run-*` sends it later

Keys are those of `metrics.jsonl`, over the key `step`. The config is the resolved job; the summary holds the last value
of every key, and `params`, the number of parameters. The run's id is kept in `wandb/id-NAME` of the run's folder: a
resumed run continues the same wandb run. A new run in the folder gets a new one, and so does a copy of another name.

Cost: a separate process, started in about a second; some hundred microseconds per row. At the end of an online run it
waits up to `finish_timeout_s` for unsent rows.
Limits: needs the wandb package (the extra "wandb"), and online a login (`wandb login`). Nothing is read from
the server, no system metrics, console output or source code are sent. If a run resumes from an earlier checkpoint,
the steps in between appear twice. If wandb fails during training, training continues without it.
"""

import logging
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan.contracts import Row, RunInfo, Tracker, option, register
from titan.errors import ConfigError, ConfigIssue, by_errno
from titan.packages import install

_log = logging.getLogger("titan")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[metrics.wandb]`: where the run appears, and how rows are sent."""

    project: str = option("titan", "project that the run belongs to")
    entity: str = option("", "user or team that owns the project; empty: the logged-in user")
    group: str = option("", "runs of one group are shown together; empty: none")
    tags: tuple[str, ...] = option((), "labels of the run")
    mode: Literal["online", "offline"] = option(
        "online", "online: send rows while training; offline: keep them for `wandb sync`"
    )
    finish_timeout_s: float = option(
        60.0,
        "longest wait for unsent rows at the end of the run; unsent rows stay on disk",
        unit="s",
        above=0,
        at_most=1e6,
    )


@register
class Wandb(Tracker):
    """A run of Weights & Biases; enabled by the table [metrics.wandb]."""

    name = "wandb"
    Config = Config
    config: Config

    _run: Any = None

    def start(self, info: RunInfo) -> None:
        """Begin the run, or go on with it.

        Raises:
            ConfigError: the package is missing, or wandb cannot begin the run; says what to do.
        """
        wandb = _package()
        own = self.config
        settings = wandb.Settings(
            x_disable_stats=True,
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            finish_timeout=own.finish_timeout_s,
        )
        try:
            self._run = wandb.init(
                project=own.project,
                entity=own.entity or None,
                group=own.group or None,
                tags=own.tags,
                mode=own.mode,
                name=info.name,
                id=_run_id(info),
                resume="allow",
                dir=str(info.folder),
                config=dict(info.config),
                allow_val_change=True,
                settings=settings,
            )
        except (wandb.Error, OSError) as error:
            what = f"[metrics.wandb] mode = {own.mode!r}: {' '.join(str(error).split())}"
            fault = ConfigIssue("", f'{what}; run `wandb login`, or set mode = "offline"')
            raise by_errno(error, ConfigError([fault])) from None
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.summary["params"] = info.params
        _log.info(f"wandb: {self._run.url if own.mode == 'online' else Path(self._run.dir).parent}")

    def log(self, row: Row) -> None:
        if self._run is None:
            return
        try:
            self._run.log({key: value for key, value in row.items() if value is not None})
        except Exception as error:  # whatever it is, it is not the training's
            _log.warning(f"wandb: {type(error).__name__}: {error}; wandb gets no more rows")
            self._run = None

    def close(self) -> None:
        """End the run, as failed where an exception is on its way; what cannot be sent in time stays on disk."""
        if self._run is None:
            return
        failed = sys.exc_info()[0] is not None
        try:
            self._run.finish(exit_code=int(failed))
        except Exception as error:
            _log.warning(f"wandb: {type(error).__name__}: {error}; wandb may show the run as unfinished")
        self._run = None


def _package() -> Any:
    try:
        import wandb
    except ImportError:
        raise ConfigError(f"[metrics.wandb] needs the wandb package: {install('wandb')}") from None
    return wandb


def _run_id(info: RunInfo) -> str:
    """The id that this folder's run has; a new one where the run starts anew."""
    path = info.folder / "wandb" / f"id-{info.name}"
    if info.start_step and path.exists():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return path.read_text(encoding="utf-8")
