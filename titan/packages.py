"""Packages of this Python: PyTorch's version, titan's own that may be absent, and the commands that install extras and
start programs."""

import os
import re
import shlex
import shutil
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan.errors import PluginError

DISTRIBUTION = "titan-train"
"""Name of the package on the index; it is imported as `titan`."""

TORCH = (2, 13), (2, 15)
"""The oldest and the newest release of PyTorch that titan is for, as pyproject.toml has them."""
TORCH_RUN = ("2.13.0", "2.14.1", "2.15.0")
"""Those that its tests were run on: docs/versions.md."""
TORCH_CHOSEN = "TITAN_TORCH"
"""Environment variable: a version of PyTorch that was chosen, from outside the range too."""


def torch_release() -> tuple[int, int]:
    """Major and minor version of the PyTorch that is installed, which this does not import; (0, 0): none is."""
    numbers = re.match(r"(\d+)\.(\d+)", installed_version("torch"))
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def installed_version(distribution: str) -> str:
    """Version of a package of this Python, which this does not import; empty: it is not installed."""
    try:
        return version(distribution) or ""  # of a folder without metadata, which an upgrade may leave, it is None
    except PackageNotFoundError:
        return ""


def check_torch() -> None:
    """PluginError: no PyTorch is installed, or one outside the range, and nobody has asked for it."""
    here = installed_version("torch")
    if TORCH[0] <= torch_release() <= TORCH[1] or (here and os.environ.get(TORCH_CHOSEN) == here.partition("+")[0]):
        return
    oldest, newest = (".".join(map(str, release)) for release in TORCH)
    what = f"PyTorch {here} is installed" if here else "no PyTorch is installed"
    anyway = f", or set {TORCH_CHOSEN}={here.partition('+')[0]} to run on this one all the same" if here else ""
    pip = shlex.join([sys.executable, "-m", "pip", "install", f"torch=={TORCH_RUN[-1]}"])
    raise PluginError(f"{what}, but titan needs {oldest} to {newest}; install one ({pip}){anyway}")


def untried_torch() -> str:
    """What to say of a PyTorch that titan's tests were not run on; empty of one that they were."""
    here = installed_version("torch").partition("+")[0]
    if here in TORCH_RUN:
        return ""
    return f"titan's tests were not run on PyTorch {here}, but on {', '.join(TORCH_RUN[:-1])} and {TORCH_RUN[-1]}"


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
    has_pip = installed_version("pip") != ""  # setuptools changes the imports of a process that looks for the module
    pip = [sys.executable, "-m", "pip"] if has_pip else ["python3", "-m", "pip", "--python", sys.executable]
    return shlex.join([*pip, "install", *what])


def program(name: str, module: str) -> list[str]:
    """The words that call a program of this Python in a shell: its name where PATH leads to it, else the way there."""
    own, found = Path(sys.executable).parent / name, shutil.which(name)
    if not own.exists():
        return [sys.executable, "-m", module]
    return [name] if found and own.samefile(found) else [str(own)]
