"""Plugins are held against their contract when their file is read."""

import importlib
import re
from pathlib import Path

import pytest

from tests.commands import run_titan
from tests.jobs import CONFIGS, LLAMA
from titan.config import load_job
from titan.contracts.plugin import registry
from titan.errors import ConfigError, PluginError, TitanError
from titan.planner.step.layout import costs_of


def plugin(contract: str, body: str) -> str:
    """A file with a plugin of this contract."""
    return f'''"""Doc."""
from dataclasses import dataclass
import torch
from titan.contracts import Axis, LrSchedule, Technique, Tokenizer, option, register

@dataclass(frozen=True, kw_only=True)
class Config:
    """Options."""
    x: int = option(1, "number")


@register
class Mine({contract}):
    """Mine."""
    name = "NAME"
    Config = Config
{body}
'''


SCHEDULE = plugin("LrSchedule", "\n    def factor(self, step: int, steps: int) -> float:\n        return 1.0")
TECHNIQUE = plugin("Technique", '    phase = "shard"\n\n    def before_step(self, step: int) -> None:\n        pass')


def with_line(line: str) -> str:
    """The technique with a line more in its class."""
    return TECHNIQUE.replace('phase = "shard"', f'phase = "shard"\n    {line}')


def with_axis(**changed: str) -> str:
    """The technique with an axis, some of whose fields are others, as they stand in its file."""
    fields = {"name": "'a'", "data": "'dealt'", "weights": "'copies'", "topology_order": "1", "doc": "''", **changed}
    return with_line(f"axes = (Axis({', '.join(f'{key}={value}' for key, value in fields.items())}),)")


def load(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(text.replace("NAME", name))
    registry.load_plugins([tmp_path])


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_brought_by", "_left_out", "_contested"):
        monkeypatch.setattr(registry, name, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TECHNIQUE.replace("before_step", "before_stp"), r"before_stp\(\) is not a hook of a technique .*before_step"),
        (TECHNIQUE.replace("step: int", "number: int"), r"before_step\(self, number\): its parameters must be \(self, step\)"),
        (SCHEDULE.replace("def factor", "def _factor"), r"missing factor\(\); define it"),
        (SCHEDULE.replace('"NAME"', '"no name"'), "must be a Python identifier"),
        (SCHEDULE.replace('    """Mine."""\n', ""), "needs a docstring"),
        (SCHEDULE.replace(', kw_only=True', ''), "Config: Config must be a @dataclass"),
        (SCHEDULE.replace("frozen=True, ", ""), "Config: Config must be a @dataclass"),
        (SCHEDULE.replace('option(1, "number")', "1"), "x needs option"),
        ("import no_such_module\n" + SCHEDULE, r"misfit\.py:1 cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (SCHEDULE.replace("(LrSchedule)", ""), "must subclass a contract of titan.contracts"),
        (TECHNIQUE.replace('"shard"', '"shards"'), r"phase = 'shards': must be one of 'convert', .* \(did you mean 'shard'\?\)"),
        (TECHNIQUE.replace('phase = "shard"', ""), "missing `phase`, which must be one of 'convert', 'split'"),
        (TECHNIQUE.replace('"shard"', '"split"'), r"phase = 'split': split\(\) is called in phase 'split' alone"),
        (TECHNIQUE.replace("before_step(self, step: int)", "split(self, model, context)"), r"phase = 'shard': split\(\) is called in"),
        (with_line('conflict = {"fsdp": "both shard"}'), r"conflict is not an attribute of a technique \(did you mean 'conflicts'\?\)"),
        (with_line('axis = [1]'), r"axis is not an attribute of a technique \(did you mean 'axes'\?\)"),
        (with_line('kind = "techniques"'), "kind = 'techniques': the contract sets it"),
        (with_line('conflicts = ["fsdp"]'), r"conflicts = \['fsdp'\]: must be a dictionary of str to str"),
        (with_line('conflicts = {"fsdp": 1}'), r"conflicts = \{'fsdp': 1\}: must be a string"),
        (with_line('covers = "dp_shard"'), "covers = 'dp_shard': must be a tuple or list of str"),
        (with_line('preserves_numerics = "no"'), "preserves_numerics = 'no': must be true or false"),
        (with_line('search_space = ({1: 2},)'), r"search_space = \(\{1: 2\},\): must be a string"),
        (with_line('axes = Axis(name="a", data="dealt", weights="copies", topology_order=1, doc="")'), r"axes = Axis\(.*: must be a tuple or list of Axis"),
        (with_line('axes = ("a",)'), r"axes = \('a',\): must be of type Axis"),
        (TECHNIQUE.replace("def before_step", "async def before_step"), r"before_step\(\) is async; it must be an ordinary method"),
        (TECHNIQUE.replace("        pass", "        yield"), r"before_step\(\) contains `yield`, so a call runs nothing"),
        (TECHNIQUE.replace("    def before_step(self, ", "    @staticmethod\n    def before_step(self, "), r"before_step\(\) is a staticmethod; it must be a method that takes self"),
        ("from titan.contracts import register\n@register\ndef misfit(): pass", "@register decorates a class"),
        (with_line('check = ["a"]'), r"check = \['a'\]: must be a method, check\(self, job, spec\)"),
        (with_axis(name="'tp'"), r"mesh axis 'tp' is already owned by technique 'tensor' in .*tensor/__init__\.py"),
        (with_axis().replace("),)", "),) * 2"), "mesh axis 'a' is already owned by technique 'misfit'"),
        (with_line('conflicts = {"fsdpp": "why"}'), r"conflicts: no plugin has the technique or capability 'fsdpp' \(did you mean 'fsdp'\?\)"),
        (with_line('requires = ("mixed_precison",)'), r"requires: no plugin has the technique or capability 'mixed_precison' \(did you mean 'mixed_precision'\?\)"),
        (with_line('covers = ("dp_shared",)'), r"covers: no plugin has the axis 'dp_shared' \(did you mean 'dp_shard'\?\)"),
        (plugin("Tokenizer", "    def vocab_size(self):\n        return 1"), r"vocab_size\(\) is a method; it must be a property or a value"),
        (SCHEDULE + SCHEDULE.partition("@register")[2].join(["\n@register", ""]).replace("class Mine", "class Steep"), r"two plugins are called lr_schedule 'misfit': Mine in .*misfit\.py and Steep in"),
        (with_axis(data="'delt'"), r"misfit\.py:18 cannot be imported: ValueError: mesh axis 'a': data = 'delt': must be one of .* \(did you mean 'dealt'\?\)"),
        (with_axis(topology_order="'1'"), "mesh axis 'a': topology_order = '1': must be a number"),
        (with_axis(topology_order="float('inf')"), "mesh axis 'a': topology_order = inf: must be a finite number"),
        (with_axis(default="0"), "mesh axis 'a': default = 0: must be at least 1, or -1 for all remaining ranks"),
        (with_axis(default="True"), "mesh axis 'a': default = True: must be an integer"),
        (with_axis(name="'a-b'"), "mesh axis 'a-b': name: must be a Python identifier"),
        (with_axis(name="1"), "mesh axis 1: name = 1: must be a string"),
        (with_axis(data="None", weights="'slices'", folds="('dp_shared',)"), r"mesh axis 'a': folds: no plugin has the axis 'dp_shared' \(did you mean 'dp_shard'\?\)"),
        (with_axis(data="None", weights="'slices'", folds="('tp',)"), r"mesh axis 'a': folds 'tp', whose ranks hold \"slices\"; they must hold \"copies\""),
        (with_axis(data="None", weights="'slices'", folds="('a',)"), r"mesh axis 'a': folds 'a', which folds other axes itself; name these"),
        (SCHEDULE.replace("x: int", "x int"), r"misfit\.py:9 cannot be imported: SyntaxError: invalid syntax"),
        (SCHEDULE + "\ndef f():\n    return torch.zeros(2) @ torch.zeros(3)\nf()\n", r"plugin /.*misfit\.py:22 cannot be imported: RuntimeError: .*add --traceback for the whole stack"),
        (SCHEDULE + "\nraise SystemExit(3)\n", r"misfit\.py:21 cannot be imported: SystemExit: 3"),
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
        registry.load_plugins([tmp_path])


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"nowhere: no such folder or \.py file"):
        registry.load_plugins([tmp_path / "nowhere"])


def test_plugins_load_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "_one.py").write_text(SCHEDULE.replace("NAME", "one"))
    (tmp_path / "other.py").write_text("raise ValueError")
    registry.load_plugins([tmp_path / "_one.py"])
    assert registry.find("lr_schedule", "one") is not None


def test_a_failed_import_leaves_no_plugin_behind(tmp_path: Path) -> None:
    with pytest.raises(PluginError):
        load(tmp_path, SCHEDULE + "raise ValueError", "half")
    assert registry.find("lr_schedule", "half") is None
    load(tmp_path, SCHEDULE, "half")
    assert registry.find("lr_schedule", "half") is not None


def test_a_file_imported_under_two_names_is_one_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    load(tmp_path, SCHEDULE, "twice_there")
    importlib.import_module("twice_there")
    assert registry.find("lr_schedule", "twice_there").__module__ == "twice_there"


@pytest.mark.parametrize(
    ("hook", "body", "message"),
    [
        ("check(self, job, spec)", "pass", r"check\(\) returned None; it must return an iterable of sentences"),
        ("check(self, job, spec)", "return 'no'", r"check\(\) returned 'no', of type str; it must return an iterable"),
        ("check(self, job, spec)", "yield 3", r"check\(\) returned 3, of type int; all its sentences must be strings"),
        ("spec(self, spec)", "pass", r"spec\(\) returned None; it must return a ModelSpec"),
        (
            "precision(self, precision)",
            "return 'bf16'",
            r"precision\(\) returned 'bf16', of type str; it must return a Precision",
        ),
        ("cost(self, costs, job)", "pass", r"cost\(\) returned None; it must return a Costs"),
        ("facts(self)", "pass", r"facts\(\) returned None; it must return a dict"),
        (
            "facts(self)",
            "return {'one_backwards': ''}",
            r"facts\(\) states 'one_backwards' \(did you mean 'one_backward'\?\)",
        ),
        (
            "check(self, job, spec)",
            "yield ''; raise ValueError('oh')",
            r"check\(\) raised ValueError: oh, at .*answers\.py:\d+ \(add --traceback",
        ),
        ("spec(self, spec)", "return spec.nosuch", r"spec\(\) raised AttributeError: .*nosuch.*answers\.py:\d+"),
        ("__init__(self, config)", "pass", r"__init__\(\) must call super\(\).__init__\(config\)"),
    ],
)
def test_what_a_hook_returns_is_checked(hook: str, body: str, message: str, tmp_path: Path) -> None:
    load(tmp_path, plugin("Technique", f'    phase = "shard"\n\n    def {hook}:\n        {body}'), "answers")
    with pytest.raises(TitanError, match=r"technique 'answers' in .*answers\.py: " + message):
        job = load_job(LLAMA, ["--data.path", "x", "--plugins.answers.enabled", "true"])
        assert hook.startswith("cost"), "only the planner asks for costs"
        costs_of(job)


@pytest.mark.parametrize("hook", ["check", "spec"])
def test_a_model_is_named_whose_hook_returns_nothing(hook: str, tmp_path: Path) -> None:
    text = (CONFIGS.parent / "plugins" / "averager.py").read_text().replace('name = "averager"', 'name = "vague"')
    text = text.replace("def spec", "def _spec" if hook == "spec" else "def spec")
    load(tmp_path, text.replace("    def build", f"    def {hook}(self):\n        pass\n\n    def build"), "vague")
    with pytest.raises(TitanError, match=rf"model 'vague' in .*vague\.py: {hook}\(\) returned None; it must return a"):
        load_job(LLAMA, ["--data.path", "x", "--model.name", "vague"])


def install(tmp_path: Path, package: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one entry point, as pip leaves it; plugins are loaded afterwards."""
    about = tmp_path / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[titan.plugins]\nmine = {package}\n")
    (tmp_path / f"{package}.py").write_text(text.replace("NAME", package))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "opened", registry.opened - {"titan.plugins:"})


BROKEN = {
    "raises": (SCHEDULE + "raise ValueError('too old')", r"_raises\.py:20 cannot be imported: ValueError: too old"),
    "misfit": (TECHNIQUE.replace('"shard"', '"shards"'), "phase = 'shards': must be one of"),
    "clash": (with_line('conflicts = {"nobody": "why"}'), "no plugin has the technique or capability 'nobody'"),
    "axis": (with_axis(name="'tp'"), "mesh axis 'tp' is already owned by"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_entry_point_is_a_warning_until_it_is_asked_for(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (text, why), package = BROKEN[case], f"broken_{case}"
    install(tmp_path, package, text, monkeypatch)
    job = load_job(LLAMA, ["--data.path", "x"])
    said = capfd.readouterr().err
    assert said.startswith(f"warning: package {package} (entry point mine = {package}) is not loaded: "), said
    assert re.search(why, said)
    asked = ["--data.path", "x", "--lr_schedule.name", package, f"--plugins.{package}.x", "1", "--metrics.ledgr.x", "1"]
    with pytest.raises(ConfigError) as error:
        load_job(LLAMA, asked)
    assert capfd.readouterr().err == "", "the warning is given once"
    assert job.lr_schedule.name == "cosine" and len(error.value.faults) == 3
    for fault in error.value.faults:
        assert "unknown" in str(fault) and f"package {package} (entry point" in str(fault), fault
        assert re.search(why, str(fault)), fault


def test_a_name_that_an_entry_point_claims_too_is_an_error_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "claims", SCHEDULE.replace("NAME", "linear"), monkeypatch)
    assert load_job(LLAMA, ["--data.path", "x"]).lr_schedule.name == "cosine"
    both = r"two plugins are called lr_schedule 'linear': Linear in .*linear\.py and Mine in .*claims\.py"
    assert re.search(both, capfd.readouterr().err)
    with pytest.raises(ConfigError, match=both):
        load_job(LLAMA, ["--data.path", "x", "--lr_schedule.name", "linear"])


def test_traceback_shows_all_of_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def inner():\n    raise ValueError('deep')\n\n\ninner()\n")
    words = ["plugins", "--path", str(tmp_path / "bad.py")]
    plain, full = (run_titan([*words, *more], tmp_path) for more in ([], ["--traceback"]))
    error = f"error: plugin {tmp_path}/bad.py:2 cannot be imported: ValueError: deep"
    assert plain.returncode == full.returncode == 2
    assert plain.stderr.startswith(error) and "Traceback" not in plain.stderr
    assert error in full.stderr and 'bad.py", line 5, in <module>' in full.stderr
