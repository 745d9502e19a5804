"""No number that a TOML can hold keeps the check, or a prediction, busy: each is taken or refused within two seconds.

Every option that takes a number, of the host and of every plugin, and every axis of the mesh, is set to numbers far
beyond its use, one at a time, above jobs that take different ways through the checks.
"""

import signal
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs import GPT, LLAMA
from tests.sweeps import sweep_but
from titan.config import load_job
from titan.config.sections import ONE_OF
from titan.contracts import Model, Technique, Tracker
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import Option, options_of
from titan.contracts.sections import SECTIONS
from titan.errors import ConfigError
from titan.planner.machine import cluster
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

LIMIT = 2.0
NUMBERS = (10**18, 2**63, 10**400, -1, 0)
INTERLEAVED = ("--plugins.pipeline.schedule=Interleaved1F1B", "--train.micro_batch_size=2")
JOBS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "llama": (LLAMA, ("--train.global_batch_size=49", "--train.micro_batch_size=7")),
    "gpt": (GPT, ()),
    "pipeline": (LLAMA, ("--mesh.pp=2", "--mesh.tp=2", "--mesh.dp_shard=2")),
    "rounds": (LLAMA, ("--model.n_layers=4", "--mesh.pp=2", *INTERLEAVED)),
    "float8": (LLAMA, ("--model.dim=64", "--plugins.float8.enabled=true", "--plugins.bf16.enabled=true")),
}


@contextmanager
def limited() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def takes_number(hint: object) -> bool:
    if typing.get_origin(hint) in (tuple, typing.Union, types.UnionType):
        return any(takes_number(part) for part in typing.get_args(hint))
    return hint in (int, float)


def number_of(option: Option, number: int) -> str:
    several = typing.get_origin(option.hint) is tuple
    return str([number] * len(typing.get_args(option.hint))) if several else str(number)


def spoilt(model: str) -> Iterator[list[str]]:
    """Words of a command line, each with one number that is far too large, or too small."""
    places = [(name, [], section) for name, section in SECTIONS.items()]
    for contract in ONE_OF:
        for plugin in registry.of_kind(contract.kind):
            if contract is not Model or plugin.name == model:
                places.append((contract.section, [f"--{contract.section}.name={plugin.name}"], plugin.Config))
    for contract in (Technique, Tracker):
        places += [(f"{contract.section}.{p.name}", [], p.Config) for p in registry.of_kind(contract.kind)]
    for number in NUMBERS:
        for table, words, config in places:
            for option in options_of(config):
                if takes_number(option.hint):
                    yield [*words, f"--{table}.{option.key}={number_of(option, number)}"]
        techniques = [p for p in registry.of_kind(Technique.kind) if issubclass(p, Technique)]
        yield from ([f"--mesh.{axis.name}={number}"] for p in techniques for axis in p.axes)


@pytest.mark.parametrize("job", sweep_but(JOBS, "llama"))
def test_every_number_is_answered_at_once(job: str) -> None:
    path, words = JOBS[job]
    base, planner = ["--data.path=tests", *words], Planner(cluster.load("a100-80gb"))
    model = load_job(path, base).model.name
    every, unanswered = list(spoilt(model)), []
    assert len(every) > 200
    for word in every:
        for what, act in (
            ("check", lambda job: None),
            ("plan", lambda job: planner.predict(costs_of(job), job.layout)),
        ):
            try:
                with limited():
                    act(load_job(path, [*base, *word]))
            except ConfigError:
                break
            except (TimeoutError, ArithmeticError, MemoryError, RuntimeError, TypeError) as problem:
                unanswered.append(f"{what} {word[-1][:60]}: {type(problem).__name__}")
                break
    assert not unanswered, "\n".join(unanswered)


@pytest.mark.parametrize("entry", ["weight = inf", f"weight = {10**400}", f"weight = {10**18}"])
def test_weights_of_a_mixture(entry: str, tmp_path: Path) -> None:
    text = '[[data.mixture]]\nname = "text"\npath = "tests"\n'
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{LLAMA}"\n[data]\nseq_len = 16\n{text}{entry}\n')
    with pytest.raises(ConfigError, match=r"\[data.mixture.0\] weight = .*: must be"):
        load_job(job)


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000])
def test_more_digits_or_brackets_than_python_reads(value: str, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f"[train]\nsteps = {value}\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_job(job)
    with pytest.raises(ConfigError, match=r"\[train\] steps"):
        load_job(LLAMA, [f"--train.steps={value}"])
