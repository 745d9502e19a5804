"""A fault: a small change of one source file, and the tests that must notice it."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout that this module is part of."""


@dataclass(frozen=True)
class Fault:
    """A change of a source file that a test must notice.

    name: what is wrong then.  file: below the checkout.  old: text that stands in the file once.  new: its replacement.
    tests: ids of the tests that notice it, the narrowest there are; each passes without the fault.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, root: Path = ROOT) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: the old text does not stand there exactly once, or the new text makes no Python module.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {count} times, required: once; adapt `old`")
        changed = text.replace(self.old, self.new)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.name}: {self.file} does not compile with the fault: {error}") from None
        return changed

    def plant(self, root: Path) -> None:
        """Write the fault into a copy of the checkout."""
        assert root != ROOT, "a fault is planted in a copy only"
        changed = self.planted(root)
        (root / self.file).write_text(changed, encoding="utf-8")
