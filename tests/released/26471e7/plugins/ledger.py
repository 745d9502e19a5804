"""A tracker from outside: losses in a text file."""

from dataclasses import dataclass
from pathlib import Path

from titan.contracts import Row, RunInfo, Tracker, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Ledger(Tracker):
    """Writes `step loss` lines to ledger.txt."""

    name = "ledger"
    Config = Config

    def start(self, info: RunInfo) -> None:
        self._file: Path = info.folder / "ledger.txt"

    def log(self, row: Row) -> None:
        with self._file.open("a") as file:
            file.write(f"{row['step']} {row['loss']}\n")
