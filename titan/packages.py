"""Packages of this Python: the commands that install optional ones, and that start their programs."""

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "titan-train"
"""Name of the package on the index; it is imported as `titan`."""


def install(extra: str) -> str:
    """The command that installs an extra into this Python: of the clone that titan runs from, or of its package."""
    root = Path(__file__).resolve().parents[1]
    clone = (root / "scripts" / "python.sh").is_file()
    what = ["-e", f"{root}[{extra}]"] if clone else [f"{DISTRIBUTION}[{extra}]"]
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") else ["python3", "-m", "pip", "--python", sys.executable]
    return shlex.join([*pip, "install", *what])


def program(name: str, module: str) -> list[str]:
    """The words that call a program of this Python in a shell: its name where PATH leads to it, else the way there."""
    own, found = Path(sys.executable).parent / name, shutil.which(name)
    if not own.exists():
        return [sys.executable, "-m", module]
    return [name] if found and own.samefile(found) else [str(own)]
