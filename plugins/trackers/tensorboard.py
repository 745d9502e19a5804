"""Metrics as TensorBoard event files, in `tensorboard/` of the run's folder.

Tags are the rows' keys under a group: `train/loss`, `speed/tokens_per_s`, `memory/peak_memory_gib`,
`validation/loss`. On resume from step s, events beyond s are purged. The
resolved job is stored as text.

Cost: about half a millisecond per row, with a flush, so that rows survive a killed process; 0.3 s at the start.
Limits: does not need tensorflow, but imports it if it is installed, which is slow. On a full disk rows are lost, and
TensorBoard's writer thread may end; the curves then have no new points until the next start.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.contracts import Row, RunInfo, Tracker, register

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

GROUPS = {
    "tokens_per_s": "speed",
    "tokens_per_s_per_device": "speed",
    "model_tflops_per_device": "speed",
    "mfu": "speed",
    "step_time_s": "speed",
    "data_time_s": "speed",
    "save_time_s": "speed",
    "validation_time_s": "speed",
    "gc_time_s": "speed",
    "peak_memory_gib": "memory",
    "peak_memory_rank": "memory",
}
"""Group of a key; `validation_loss` is `validation/loss`, all others are of the training itself."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[metrics.tensorboard]`: none besides `enabled`."""


@register
class TensorBoard(Tracker):
    """Writes TensorBoard event files, with tags in groups such as train/loss."""

    name = "tensorboard"
    Config = Config
    default = True

    _writer: "SummaryWriter | None" = None

    def start(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(info.folder / "tensorboard"), purge_step=info.start_step + 1)
        self._writer.add_text("config", _as_markdown(info.config), info.start_step)

    def log(self, row: Row) -> None:
        assert self._writer is not None, "log() before start()"
        for key, value in row.items():
            if value is not None and key not in ("step", "time"):
                self._writer.add_scalar(_tag(key), value, row["step"], walltime=row.get("time"))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _tag(key: str) -> str:
    own = key.removeprefix("validation_")
    return f"validation/{own}" if own != key and key not in GROUPS else f"{GROUPS.get(key, 'train')}/{key}"


def _as_markdown(config: Any, depth: int = 0) -> str:
    """A table of tables as a nested list."""
    lines = []
    for key, value in config.items():
        nested = isinstance(value, dict)
        lines.append(f"{'    ' * depth}- **{key}**" + ("" if nested else f" = `{value!r}`"))
        if nested and value:
            lines.append(_as_markdown(value, depth + 1))
    return "\n".join(lines)
