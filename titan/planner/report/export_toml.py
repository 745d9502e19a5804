"""A layout as a TOML that can be trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from titan.config import load_job
from titan.errors import ConfigError, ConfigIssue, by_errno


def write_toml(path: Path, config: Path | None, overrides: Sequence[str], values: Mapping[str, Any]) -> None:
    """Write the job of a TOML under overrides with dotted keys laid over it, resolved; it has been loaded to see.

    Raises:
        ConfigError: the job is refused, or the file cannot be written.
    """
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    table = dict(load_job(config, [*overrides, *words]).table)
    table["run"] = {key: value for key, value in table["run"].items() if key != "name"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except OSError as error:
        raise by_errno(error, ConfigError([ConfigIssue(str(path), f"cannot be written: {error.strerror}")])) from None
