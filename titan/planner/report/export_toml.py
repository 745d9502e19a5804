"""A chosen layout as the TOML of a job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from titan.config import load_job
from titan.errors import ConfigError, ConfigIssue, by_errno


def write_toml(path: Path, config: Path | None, overrides: Sequence[str], values: Mapping[str, Any]) -> None:
    """Write a job with a chosen layout as a resolved TOML. The job is loaded first, so that the file is valid.

    path: file to write; its folder is created.  config: TOML of the job; None: quickstart.  overrides: `--key=value`
    words.  values: dotted keys of the layout, which override both.

    Raises:
        ConfigError: the job is invalid, or the file cannot be written.
    """
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    table = dict(load_job(config, [*overrides, *words]).table)
    table["run"] = {key: value for key, value in table["run"].items() if key != "name"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except OSError as error:
        raise by_errno(error, ConfigError([ConfigIssue(str(path), f"cannot be written: {error.strerror}")])) from None
