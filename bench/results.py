"""Files of benchmark results: the newest of each kind, with raw samples, commit, versions and machine.

bench/results/KIND.json is the newest result of a kind. A newer one replaces it, and what the replaced one said is
appended to bench/results/earlier.jsonl, one line each. `python -m bench.tables` writes both into docs/benchmarks.md.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.headlines import headline

FOLDER = Path(__file__).parent / "results"
EARLIER = "earlier.jsonl"


def write(kind: str, measured: dict[str, Any]) -> Path:
    """Write `measured` and the environment to KIND.json, in place of the last result; returns its path.

    Args:
        kind: a kind of `bench.headlines.KINDS`.
        measured: plain data.
    """
    found = {**about(), **measured}  # first: a file written here would be a change since the commit
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{kind}.json"
    if path.is_file():
        replaced = json.loads(path.read_text(encoding="utf-8"))
        try:
            said = headline(kind, replaced)
        except (KeyError, TypeError):  # by an earlier form of the command: no reason to lose what was measured now
            said = "in an earlier form"
        line = {"kind": kind, **{key: replaced[key] for key in ("date", "commit")}, "said": said}
        with (FOLDER / EARLIER).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    path.write_text(as_text(found), encoding="utf-8")
    return path


def as_text(found: dict[str, Any]) -> str:
    """A result as JSON with one line per key, and per item of a table or list of tables or lists under it."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in found.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, dict) and any(isinstance(each, (dict, list)) for each in value.values()):
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()) + "\n }"
    if isinstance(value, list) and any(isinstance(each, (dict, list, str)) for each in value):
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    return json.dumps(value)


def newest() -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, content) of the files of results, by kind."""
    for path in sorted(FOLDER.glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def earlier() -> list[dict[str, str]]:
    """What replaced results said: kind, date, commit, said; in the order in which they were replaced."""
    path = FOLDER / EARLIER
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def about() -> dict[str, Any]:
    """Commit, date, versions and machine."""
    cpu = f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return {
        "commit": os.environ.get("TITAN_COMMIT") or _commit() or "unknown",  # a copy of the code is told
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
    }


def _commit() -> str:
    """Of the code, with "-dirty" where it has changed since; results that other benchmarks wrote do not count."""
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results")
        return _git("describe", "--always") + ("-dirty" if changed else "")
    except FileNotFoundError:  # a machine without git
        return ""


def _git(*words: str) -> str:
    command = ["git", "-C", str(FOLDER.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
