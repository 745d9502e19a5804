"""Metrics as example.csv in the run's folder: a line `step,loss` for each logged row of training."""

from dataclasses import dataclass

from titan.contracts import Row, RunInfo, Tracker, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[metrics.example]`."""

    digits: int = option(6, "digits of the loss", at_least=1)


@register
class Example(Tracker):
    """Writes step and loss to a CSV file."""

    name = "example"
    Config = Config

    def start(self, info: RunInfo) -> None:
        """Called on rank 0 alone. A resumed run continues the file."""
        self._path = info.folder / "example.csv"
        if not info.start_step:
            self._path.write_text("step,loss\n")

    def log(self, row: Row) -> None:
        """Rows of validation have other keys, and no loss."""
        if row.get("loss") is not None:
            with self._path.open("a") as file:
                file.write(f"{row['step']},{row['loss']:.{self.config.digits}g}\n")
