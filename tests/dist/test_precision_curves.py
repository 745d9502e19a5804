"""Fifty steps in each precision stay near those in the precision that it stands in for, on one rank or several.

A precision rounds, so its curve is another one. What must hold is that it learns as fast. The measure is `apart`: the
largest difference of the losses, each a mean over the last ten steps, in nats per token. To add a precision, add a line
to `CURVES` and one to the table of docs/correctness.md. `python -m tests.dist.test_precision_curves NAME` prints what a
precision measures; its bound is about twice the largest figure.
"""

import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.jobs import mesh
from tests.sweeps import sweep_but
from titan.testing.jobs import Outcome, train_job

STEPS, SMOOTHED = 50, 10
BASE = tuple(
    "--model.n_layers 2 --model.dim 64 --model.ffn_dim 128 --data.seq_len 32 --optimizer.lr 2e-3 "
    f"--train.steps {STEPS} --lr_schedule.warmup_steps 3 --lr_schedule.decay_steps 7".split()
)
FP32: tuple[str, ...] = ()
BF16 = ("--plugins.bf16.enabled", "true")
LAYOUTS = {"one": {}, "dp": {"dp_shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}


class Curve(NamedTuple):
    """A precision, what it is held against on one rank, and how far apart the two may be.

    words: overrides that set it.
    reference: overrides of the precision that it stands in for.
    bound: largest `apart` at any layout, nats; about twice what was measured.
    """

    words: tuple[str, ...]
    reference: tuple[str, ...]
    bound: float


WORDS = ("--model.vocab_size", "320")
"""Multiples of 32 for each of two ranks, as `KEYS` makes of the keys."""
KEYS = ("--model.n_kv_heads", "4")
HEAD = (*WORDS, "--plugins.float8.head", "true")
ROWWISE, HIGH, MX = (("--plugins.float8.recipe", name) for name in ("rowwise", "rowwise_with_gw_hp", "mxfp8"))


def float8(*words: str) -> tuple[str, ...]:
    return (*BF16, "--plugins.float8.emulate", "always", *words)


def pure(rounding: str) -> tuple[str, ...]:
    return (*BF16, "--plugins.bf16.pure", "true", "--plugins.bf16.rounding", rounding)


CURVES = {
    "bf16": Curve(BF16, FP32, 0.003),
    "fp16": Curve(("--plugins.fp16.enabled", "true"), FP32, 0.0001),
    "pure bf16, nearest": Curve(pure("nearest"), BF16, 0.06),
    "pure bf16, stochastic": Curve(pure("stochastic"), BF16, 0.0035),
    "pure bf16, kahan": Curve(pure("kahan"), BF16, 0.0016),
    "float8 tensorwise": Curve(float8(), BF16, 0.005),
    "float8 tensorwise, gathered": Curve(float8("--plugins.float8.fsdp_all_gather", "true"), BF16, 0.006),
    "float8 rowwise": Curve(float8(*ROWWISE), BF16, 0.002),
    "float8 rowwise_with_gw_hp": Curve(float8(*HIGH), BF16, 0.002),
    "float8 tensorwise, head": Curve(float8(*HEAD), (*BF16, *WORDS), 0.004),
    "float8 rowwise, head": Curve(float8(*HEAD, *ROWWISE), (*BF16, *WORDS), 0.0075),
    "mxfp8": Curve(float8(*KEYS, *MX), (*BF16, *KEYS), 0.0055),
    "mxfp8, head": Curve(float8(*KEYS, *HEAD, *MX), (*BF16, *KEYS, *WORDS), 0.009),
}
KEPT = [("bf16", "one"), ("pure bf16, stochastic", "one")]
WIDE = [
    ("fp16", "pp"),
    ("pure bf16, stochastic", "dp"),
    ("float8 tensorwise, gathered", "dp"),
    ("float8 rowwise", "tp"),
]
"""Roundings at layouts; `measure` gives the figures of all."""
ALONE = [(name, "one") for name in CURVES if name not in dict(KEPT + WIDE)]
CASES = [*KEPT, *ALONE, *WIDE]


@cache
def trained(words: Sequence[str], layout: str) -> Outcome:
    degrees = LAYOUTS[layout]
    with TemporaryDirectory(prefix="curve-") as folder:
        return train_job(Path(folder), 2 if degrees else 1, *BASE, *words, *mesh(**degrees))


def apart(reference: Outcome, other: Outcome) -> float:
    """The largest difference of the two losses, smoothed over the last ten steps, in nats per token."""
    pairs = zip(_smoothed(reference.loss), _smoothed(other.loss), strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


def _smoothed(losses: list[float]) -> list[float]:
    return [sum(losses[end - SMOOTHED : end]) / SMOOTHED for end in range(SMOOTHED, len(losses) + 1)]


def measure(name: str, layout: str) -> float:
    """How far a precision is from its reference on one rank, at a layout."""
    return apart(trained(CURVES[name].reference, "one"), trained(CURVES[name].words, layout))


@pytest.mark.parametrize(("name", "layout"), sweep_but(CASES, *KEPT), ids=str)
def test_fifty_steps_stay_near_the_precision_it_stands_in_for(name: str, layout: str) -> None:
    curve = CURVES[name]
    if "--plugins.float8.emulate" in curve.words and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    reference = trained(curve.reference, "one")
    assert len(reference.loss) == STEPS and reference.loss[0] - reference.loss[-1] > 1, "the reference has to learn"
    found = measure(name, layout)
    assert 0 < found < curve.bound, f"{name} at {layout}: {found:.4f} nats from its reference, bound {curve.bound}"


def test_the_measure_tells_a_slower_curve_from_a_rounded_one() -> None:
    slower = trained((*BF16, "--optimizer.lr", "1.8e-3"), "one")
    # What rounds updates to nearest loses some of them, and is itself slower.
    bounds = [curve.bound for name, curve in CURVES.items() if "nearest" not in name]
    assert apart(trained(BF16, "one"), slower) > 10 * max(bounds)


if __name__ == "__main__":
    for name, layout in product(CURVES, LAYOUTS):
        if name.startswith(tuple(sys.argv[1:]) or ""):
            print(f"{name}, {layout}: {measure(name, layout):.4f} nats, bound {CURVES[name].bound}", flush=True)
