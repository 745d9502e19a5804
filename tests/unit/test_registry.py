"""Plugins are held against their contract when their file is read."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from titan.contracts.base import registry
from titan.errors import PluginError

HEAD = '''"""Doc."""
from dataclasses import dataclass
import torch
from titan.contracts import LrSchedule, Technique, option, register

@dataclass(frozen=True, kw_only=True)
class Config:
    """Options."""
    x: int = option(1, "number")

'''
SCHEDULE = (
    HEAD
    + '''
@register
class Flat(LrSchedule):
    """Flat."""
    name = "NAME"
    Config = Config

    def factor(self, step: int, steps: int) -> float:
        return 1.0
'''
)
TECHNIQUE = (
    HEAD
    + '''
@register
class Mine(Technique):
    """Mine."""
    name = "NAME"
    Config = Config
    phase = "shard"

    def before_step(self, step: int) -> None:
        pass
'''
)


def load(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(text.replace("NAME", name))
    registry.open_doors([tmp_path])


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.open_doors()
    monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))
    monkeypatch.setattr(registry, "_opened", set(registry._opened))


def test_a_folder_is_a_door(tmp_path: Path) -> None:
    load(tmp_path, SCHEDULE, "flat_a")
    assert registry.find("lr_schedule", "flat_a") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TECHNIQUE.replace("before_step", "before_stp"), r"before_stp\(\) is no hook of a technique .*before_step"),
        (TECHNIQUE.replace("step: int", "number: int"), r"before_step\(self, number\) should be before_step\(self, step\)"),
        (SCHEDULE.replace("def factor", "def _factor"), r"lacks factor\(\)"),
        (SCHEDULE.replace('"NAME"', '"no name"'), "must be a word"),
        (SCHEDULE.replace('    """Flat."""\n', ""), "needs a docstring"),
        (SCHEDULE.replace(', kw_only=True', ''), "Config: Config must be a @dataclass"),
        (SCHEDULE.replace("frozen=True, ", ""), "Config: Config must be a @dataclass"),
        (SCHEDULE.replace('option(1, "number")', "1"), "x needs option"),
        ("import no_such_module\n" + SCHEDULE, "cannot be imported: ModuleNotFoundError"),
        (SCHEDULE.replace("class Flat(LrSchedule)", "class Flat"), "derives from no contract"),
    ],
)  # fmt: skip
def test_misfits_are_refused_with_file_and_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as error:
        load(tmp_path, text, "misfit")
    assert "misfit.py" in str(error.value)


def test_two_owners_of_a_name_are_both_named(tmp_path: Path) -> None:
    load(tmp_path, SCHEDULE, "first")
    (tmp_path / "second.py").write_text(SCHEDULE.replace("NAME", "first"))
    with pytest.raises(PluginError, match=r"first\.py and .*second\.py"):
        registry.open_doors([tmp_path])


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="nowhere is not a folder"):
        registry.open_doors([tmp_path / "nowhere"])


def test_commands_that_train_nothing_start_without_the_compiler() -> None:
    """It takes a second to import; plugins that need it, or what needs it, import that where they use it."""
    code = "import sys; from titan.contracts.base import registry; registry.open_doors(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "titan.plugins.parallel.pipeline" in loaded
    assert not {"torch._dynamo", "torch._inductor", "torch.distributed.pipelining"} & set(loaded)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((f"titan.{name}", f"titan.contracts.base.{name}") for name in ("cost", "mesh", "options", "plan")),
        *((f"titan.data.{name}", f"titan.data.tokens.{name}") for name in ("bytepairs", "exchange", "files", "shards")),
    ],
)
def test_a_plugin_written_for_0_1_finds_what_it_imports(old: str, new: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(new)
