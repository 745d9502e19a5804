"""`titan.testing` notices a plugin that breaks the contract, a curve that differs, and a test that catches nothing."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.sweeps import swept_case
from titan.testing import assert_caught, check_plugin, checks, make_plugin, one_rank, train_job

HEAD = """
from dataclasses import dataclass
from typing import Literal
from titan.contracts import REQUIRED, LrSchedule, Technique, option, register

"""
CONFIG = """
@dataclass(frozen=True, kw_only=True)
class Config:
    share: float = option(0.5, "share", at_least=0, at_most=1)

"""
SCHEDULE = """
@register
class Wrong(LrSchedule):
    'A schedule.'
    name = "wrong"
    Config = Config

    def factor(self, step, steps):
        return VALUE
"""
TECHNIQUE = """
@register
class Wrong(Technique):
    'A technique.'
    name = "wrong"
    Config = Config
    phase = "materialise"

    def apply(self, part, context):
        self._part = part

    def after_backward(self):
        for _, parameter in self._part.parameters():
            parameter.grad.mul_(1.001)
"""
CASES = {
    "factor above 1": (CONFIG + SCHEDULE.replace("VALUE", "2.0"), "factors_stay_between_0_and_1", r"\[2\.0, 2\.0"),
    "documentation": (
        CONFIG.replace('"share"', '"share."') + SCHEDULE.replace("VALUE", "1.0"),
        "options_are_documented_and_survive_a_round_trip",
        "documentation of option share ends with a period",
    ),
    "curve": (CONFIG + TECHNIQUE, "curve_stays_and_checkpoint_loads_without_it", r"step 1: grad_norm"),
}


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    return tmp_path / "wrong.py"


@pytest.mark.parametrize("case", CASES)
def test_a_plugin_that_breaks_the_contract_fails_one_check(case: str, plugin: Path, tmp_path: Path) -> None:
    source, name, said = CASES[case]
    plugin.write_text(HEAD + source)
    for check in checks("wrong", "--plugins.path", str(plugin)):
        folder = tmp_path / check.run.__name__
        folder.mkdir()
        with pytest.raises(AssertionError, match=said) if folder.name == name else nullcontext():
            check(folder)
    (tmp_path / "all").mkdir()
    with pytest.raises(AssertionError, match=said):
        check_plugin("wrong", tmp_path / "all", "--plugins.path", str(plugin))


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("adamv", "", r"no plugin is named 'adamv' \(did you mean 'adamw'"),
        ("adamw", "loss", "no loss is named 'adamw'"),
    ],
)
def test_a_name_that_nobody_has(name: str, kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checks(name, kind=kind)


def test_a_name_of_two_kinds(plugin: Path) -> None:
    plugin.write_text(HEAD + CONFIG + SCHEDULE + TECHNIQUE.replace("class Wrong", "class Other"))
    words = ("--plugins.path", str(plugin))
    with pytest.raises(ValueError, match="several kinds are named 'wrong': give kind, one of 'lr_schedule', 'tech"):
        checks("wrong", *words)
    assert make_plugin("wrong", *words, kind="technique", share=0.25).config.share == 0.25
    with pytest.raises(ValueError, match=r"share.*= 2.*at most 1"):
        make_plugin("wrong", *words, kind="technique", share=2.0)


REQUIRED_OPTIONS = """
@dataclass(frozen=True, kw_only=True)
class Config:
    mode: Literal["slow", "fast"] = option(REQUIRED, "mode")
    on: bool = option(REQUIRED, "flag")
    names: tuple[str, ...] | None = option(REQUIRED, "names")
    betas: tuple[float, float] = option(REQUIRED, "shares", at_least=0, below=1)
    share: float = option(REQUIRED, "share", above=0.25, below=0.75)
    few: int = option(REQUIRED, "number", at_most=4)
    least: float = option(REQUIRED, "number", above=10)

"""


def test_options_that_are_required_have_values_within_their_bounds(plugin: Path, tmp_path: Path) -> None:
    plugin.write_text(HEAD + REQUIRED_OPTIONS + SCHEDULE.replace("VALUE", "1.0"))
    check_plugin("wrong", tmp_path / "all", "--plugins.path", str(plugin))
    config = make_plugin("wrong", "--plugins.path", str(plugin), few=3).config
    assert (config.mode, config.on, config.names, config.few, config.share) == ("slow", True, ("x",), 3, 0.5)
    words = (f"--plugins.path={plugin}", "--lr_schedule.mode", "fast", "--lr_schedule.few=2")
    config = make_plugin("wrong", *words).config
    assert (config.mode, config.few) == ("fast", 2)
    with pytest.raises(ValueError, match=r"few.*= 5.*at most 4"):
        make_plugin("wrong", *words, "--lr_schedule.few", "5")


def test_a_dataset_is_read_where_words_say_what_it_requires(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a text")
    names = [
        [check.run.__name__ for check in checks("text", *words, kind="dataset")]
        for words in ((), ("--data.path", str(tmp_path / "text")))
    ]
    assert names[1] == [*names[0], "files_are_read_in_a_fixed_order"]
    check_plugin("text", tmp_path / "all", "--data.path", str(tmp_path / "text"), kind="dataset")


@pytest.mark.parametrize("peak", [2000, 20_000])
def test_a_schedule_reaches_its_peak_in_a_long_run(peak: int, plugin: Path, tmp_path: Path) -> None:
    plugin.write_text(HEAD + CONFIG + SCHEDULE.replace("VALUE", f"min(1.0, step / {peak})"))
    checked = {check.run.__name__: check for check in checks("wrong", "--plugins.path", str(plugin))}
    refused = pytest.raises(AssertionError, match="no factor of 10,000 steps is 1, the largest")
    with refused if peak > 10_000 else nullcontext():
        checked["factors_stay_between_0_and_1"](tmp_path)


def test_an_outcome_tells_what_was_logged(tmp_path: Path) -> None:
    outcome = train_job(tmp_path, 2, "--mesh.dp_shard", "2", "--train.steps", "2")
    assert outcome.folder == tmp_path / "run" and (outcome.folder / "config.toml").is_file()
    assert outcome.loss == [outcome.rows[1]["loss"], outcome.rows[2]["loss"]]
    assert outcome.grad_norm == [outcome.rows[1]["grad_norm"], outcome.rows[2]["grad_norm"]]
    assert outcome.weights.keys() == one_rank().weights.keys()


@pytest.mark.parametrize("source", [".", swept_case("src")])
def test_assert_caught(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / source).mkdir(parents=True)
    (package / source / "value_of_one.py").write_text("VALUE = 1  # one\nOTHER = 2\n")
    test = "from value_of_one import VALUE\n\ndef test_value():\n    assert VALUE == 1\n"
    (package / "test_value.py").write_text(test)
    file = f"{source}/value_of_one.py"
    monkeypatch.chdir(package)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert_caught(Path(), file, "VALUE = 1", "VALUE = 3", "test_value.py")
    with pytest.raises(AssertionError, match=r"(?s)to fail with 'OTHER = 2' replaced.*but all tests pass.*1 passed"):
        assert_caught(package, file, "OTHER = 2", "OTHER = 3", "test_value.py::test_value")
    with pytest.raises(ValueError, match="'absent > 1': the module has it 0 times"):
        assert_caught(package, file, "absent > 1", "x", "no_such_test.py")  # before any test is run
    with pytest.raises(ValueError, match="has nothing that is called value"):
        assert_caught(package, file, "VALUE = 1", "VALUE = value", "test_value.py")
    with pytest.raises(ValueError, match=r"elsewhere.py does not lie below .*package"):
        assert_caught(package, file, "VALUE = 1", "VALUE = 3", "../elsewhere.py")
    (tmp_path / "linked.py").write_text("VALUE = 1")
    (package / "link.py").symlink_to(tmp_path / "linked.py")
    for outside in ("link.py", str(tmp_path / "linked.py"), "none.py"):
        with pytest.raises(ValueError, match=r"no such file lies below .*as in mine.py::Mine.step"):
            assert_caught(package, outside, "VALUE = 1", "VALUE = 3", "test_value.py")
    (package / source / "value_of_one.py").write_text("VALUE = 4\n")
    with pytest.raises(AssertionError, match=r"(?s)without a fault, test_value.py::test_value fails.*assert 4 == 1"):
        assert_caught(package, file, "VALUE = 4", "VALUE = 1", "test_value.py")


def test_pytest_is_asked_for_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.setattr("titan.testing.faults.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("testing]")):
        assert_caught(Path(), "a.py", "a", "b", "test_a.py")
