"""Options: one declaration, strict TOML, command-line words typed by their option, all faults at once."""

from dataclasses import dataclass
from typing import Literal

import pytest

from titan.contracts.plugin.options import (
    REQUIRED,
    CliText,
    Where,
    as_table,
    coerce,
    did_you_mean,
    option,
    options_of,
    parse,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = option(REQUIRED, "updates", at_least=1)
    rate: float = option(0.1, "rate", above=0, at_most=1)
    mode: Literal["full", "every"] = option("full", "which")
    stage: Literal[1, 2, 3] | None = option(None, "stage")
    name: str = option("", "name")
    paths: str | tuple[str, ...] = option((), "where")
    betas: tuple[float, float] = option((0.9, 0.95), "decay", at_least=0, below=1)
    on: bool = option(False, "flag", key="async")


HERE = Where("table", "a.toml", {"rate": "command line"})


def good(**table: object) -> Config:
    config, faults = parse(Config, {"steps": 3, **table}, HERE)
    assert config is not None and not faults, faults
    return config


def test_defaults_and_keys() -> None:
    config = good(**{"async": True})
    assert (config.steps, config.rate, config.on) == (3, 0.1, True)
    assert as_table(config)["async"] is True and "stage" not in as_table(config)


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("10", str, "10"),
        ("10", int, 10),
        ("3e-4", float, 3e-4),
        ("1", float, 1.0),
        ("true", bool, True),
        ("every", Literal["full", "every"], "every"),
        ("2", Literal[1, 2, 3] | None, 2),
        ("none", Literal[1, 2, 3] | None, None),
        ("a,b", tuple[str, ...], ("a", "b")),
        ('["a", "b,c"]', str | tuple[str, ...], ("a", "b,c")),
        ("[ab]*", str | tuple[str, ...], "[ab]*"),
        ("0.8,0.9", tuple[float, float], (0.8, 0.9)),
        ("", tuple[str, ...], ()),
    ],
)
def test_words_of_the_command_line_follow_their_option(text: str, hint: object, value: object) -> None:
    assert coerce(CliText(text), hint) == value


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, bool),
        (True, int),
        (True, float),
        ("3", int),
        (3, str),
        (2.0, int),
        ("x", Literal["y"]),
        (True, Literal[1]),
        ([1], tuple[str, ...]),
    ],
)
def test_toml_is_strict(value: object, hint: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        coerce(value, hint)


def test_every_fault_is_found_and_placed() -> None:
    config, faults = parse(Config, {"rate": 2.0, "mod": "full", "betas": [0.9, 1.0]}, HERE)
    assert config is None
    assert [str(fault) for fault in faults] == [
        "a.toml: [table] mod: unknown key (did you mean 'mode'?)",
        "a.toml: [table] steps: missing; required: updates",
        "command line: [table] rate = 2.0: must be at most 1",
        "a.toml: [table] betas = [0.9, 1.0]: must be below 1",
    ]


def test_an_option_that_may_have_no_value_says_how_to_give_none() -> None:
    _, faults = parse(Config, {"steps": 3, "stage": 4}, HERE)
    assert [fault.what for fault in faults] == ["[table] stage = 4: must be one of 1, 2, 3, or left out"]
    _, faults = parse(Config, {"steps": 3, "stage": CliText("4")}, HERE)
    assert [fault.what for fault in faults] == ["[table] stage = 4: must be one of 1, 2, 3, or none"]
    assert parse(Config, {"steps": 3, "stage": CliText("none")}, HERE) == (good(), [])


def test_nearest_name_or_all_names() -> None:
    assert did_you_mean("tensro", ["tensor", "fsdp"]) == " (did you mean 'tensor'?)"
    assert did_you_mean("zzz", ["tensor", "fsdp"]) == " (known: fsdp, tensor)"
    assert did_you_mean("zzz", []) == ""


def test_a_config_must_be_frozen_and_documented() -> None:
    @dataclass
    class Mutable:
        x: int = 0

    @dataclass(frozen=True, kw_only=True)
    class Bare:
        x: int = 0

    @dataclass(frozen=True, kw_only=True)
    class Twice:
        x: int = option(0, "one")
        y: int = option(0, "another", key="x")

    with pytest.raises(TypeError, match="frozen"):
        options_of(Mutable)
    with pytest.raises(TypeError, match=r"x needs option"):
        options_of(Bare)
    with pytest.raises(TypeError, match="x is the key of two options"):
        options_of(Twice)
