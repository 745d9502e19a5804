"""Wheels of packages in this repository, built without network, and environments that have them installed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (
    "titan",
    "plugins",
    "planner",
    "inference",
    "testing",
    "configs",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
BUILD = "from setuptools import build_meta; build_meta.build_wheel('wheel')"


def build(folder: Path, source: Path = ROOT, names: Iterable[str] = SOURCES) -> Path:
    """The wheel of the package that these files and folders of `source` make, built in a copy of them in `folder`."""
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source / name, folder / name)
    subprocess.run([sys.executable, "-W", "ignore", "-c", BUILD], cwd=folder, check=True, capture_output=True)
    [built] = (folder / "wheel").glob("*.whl")
    return built


class Environment:
    """A virtual environment in `folder` with these wheels, and below them what this process's environment has.

    Neither the repository nor what it has installed of titan can be imported in it.
    """

    def __init__(self, folder: Path, wheels: Sequence[Path]) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
        [packages] = (folder / "lib").glob("python3*/site-packages")
        # A folder that a .pth file names is searched, but .pth files in it are not read: no editable install of titan.
        (packages / "below.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        self.folder = folder
        self.install(*wheels)

    def install(self, *wheels: Path) -> None:
        """Install wheels, without what they depend on."""
        done = self.run("python", "-m", "pip", "install", "--no-index", "--no-deps", *map(str, wheels), at=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: str, at: Path, timeout: float = 250.0) -> "subprocess.CompletedProcess[str]":
        """Run a command of this environment in the folder `at`, with no variable of the test's but the threads."""
        variables = {"PATH": f"{self.folder}/bin:{os.defpath}", "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        program = self.folder / "bin" / command[0]
        words = [str(program) if program.exists() else command[0], *command[1:]]
        return subprocess.run(words, cwd=at, env=variables, capture_output=True, text=True, timeout=timeout)
