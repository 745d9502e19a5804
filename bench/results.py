"""Writes the results of a benchmark: one JSON per run, with raw samples, commit, versions and machine."""

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"


def write(name: str, measured: dict[str, Any]) -> Path:
    """Write `measured` and the environment to results/NAME-DATE.json; returns its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps({**about(), **measured}, indent=1) + "\n")
    return path


def about() -> dict[str, Any]:
    """Commit, date, versions and machine."""
    git = ["git", "-C", str(FOLDER.parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # a machine without git
        commit = ""
    return {
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
    }
