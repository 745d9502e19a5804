"""The contract suite (`titan.testing.contract`) over every plugin of `plugins/`, today's and tomorrow's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import CONFIGS, LLAMA, MOE
from titan.contracts import Model, Technique
from titan.contracts.plugin import registry
from titan.contracts.plugin.registry import Plugin
from titan.testing.contract import Check, checks, curve_is_the_same_on_two_ranks

registry.load_plugins()
# Other tests may have loaded plugins of tests/plugins already.
EVERY = [plugin for plugin in registry.every() if plugin.__module__.startswith("titan.plugins.")]

# Some techniques need room to work in, or cost too much to be run in every mode here; their own tests do.
WORDS: dict[str, tuple[str, ...]] = {
    "attention": ("--plugins.attention.backend", "math"),  # auto leaves heads of 8 features on a CPU alone
    "compile": ("--plugins.compile.backend", "aot_eager"),
    "schedule_free_adamw": ("--lr_schedule.name", "constant"),
}
JOBS = {"update_in_backward": CONFIGS / "one_update.toml"}


def job_file(plugin: type[Plugin]) -> Path:
    """A job whose model has what a technique shares: an axis that folds others is for stacks of weights."""
    if plugin.name in JOBS:
        return JOBS[plugin.name]
    if issubclass(plugin, Model):
        return CONFIGS / f"{plugin.name}.toml" if plugin.name != "llama" else LLAMA
    return MOE if issubclass(plugin, Technique) and any(axis.folds for axis in plugin.axes) else LLAMA


def cases() -> Iterator[Any]:
    for plugin in EVERY:
        words = WORDS.get(plugin.name, ())
        for check in checks(plugin.name, *words, kind=plugin.kind, config=job_file(plugin)):
            # tests/dist/test_parity.py trains each model on several ranks, with the default of every other kind.
            sweep = pytest.mark.sweep if check.run is curve_is_the_same_on_two_ranks else ()
            yield pytest.param(check, id=str(check), marks=sweep)


@pytest.mark.parametrize("check", list(cases()))
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)
