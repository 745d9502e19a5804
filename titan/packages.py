"""Packages of this Python: titan's own that may be absent, and the commands that install extras and start programs."""

import shlex
import shutil
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan.errors import PluginError

DISTRIBUTION = "titan-train"
"""Name of the package on the index; it is imported as `titan`."""


def trainer_api(package: str) -> Any:
    """What a run may ask of a package that no run needs, such as `titan.planner`; None: it is not installed.

    Raises:
        PluginError: it cannot be imported.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # the latter: a folder without sources
        return None
    try:
        return import_module(f"{package}.trainer_api")
    except ImportError as error:
        raise PluginError(f"{package} cannot be imported: {error}; install titan again") from error


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
