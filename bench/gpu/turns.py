"""Whole steps of titan and torchtitan in turns: the same untied model, tokens, optimizer and compilation by block.

torchtitan does not wrap a model for one GPU in `fully_shard`: it keeps parameters and gradients in float32 and computes
in autocast. titan wraps it, as on any number of ranks. So torchtitan runs in both forms, and wrapped in two: by default
it gathers the parameters of a block again for its backward, while titan keeps them (`zero_stage = 2`).

Selective recomputation is what each trainer means by it: titan keeps the results of all matrix products, torchtitan of
every second one.
"""

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.gpu import isolated, opponent, speed
from bench.gpu.records import Row
from bench.gpu.setting import Setting
from bench.gpu.shapes import JOBS, keys_of

NEEDED = ("torchtitan", "tyro", "datasets", "tokenizers", "einops")
"""datasets may be a stub: torchtitan imports it, and this comparison reads no text."""

FORMS = {"torchtitan": "", "torchtitan, fully_shard": "default", "torchtitan, fully_shard, gathered once": "never"}
"""The forms of torchtitan, and how each reshards after a forward in `fully_shard` on one rank; empty: not wrapped."""


def turns(name: str, count: int = 2, forms: tuple[str, ...] = tuple(FORMS)) -> Callable[[Setting], Iterator[Row]]:
    """The measurement of a job of `JOBS` in turns with these forms of torchtitan, each turn a process of its own."""
    return lambda setting: _turns(setting, name, count, forms)


def _turns(setting: Setting, name: str, count: int, forms: tuple[str, ...]) -> Iterator[Row]:
    absent = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    taken: dict[str, list[dict[str, Any]]] = {"": [], **{form: [] for form in ([] if absent else forms)}}
    failures = {"torchtitan": f"cannot be imported: no {', '.join(absent)}"} if absent else {}
    for _ in range(count):
        for who in [each for each in taken if each not in failures]:
            work = partial(speed.steps_of, setting, name)
            if who:
                work = partial(opponent.steps_of, _asked(setting, name, taken[""][0]["sizes"], FORMS[who]))
            try:
                taken[who].append(isolated.call(work, setting.log, speed.LIMIT_S))
            except isolated.CallError as error:
                if not who:
                    raise
                failures[who] = str(error)
    ours = _joined(taken.pop(""))
    yield from speed.rows(name, ours)
    for who, theirs in taken.items():
        if who not in failures:
            yield from _rows(f"{name}, {who}", _joined(theirs), ours)
    for who, failure in failures.items():
        yield Row(f"{name}, {who}", failure, passed=None if absent else False)


def _rows(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[Row]:
    step, mine = (statistics.median(taken["steps_s"]) for taken in (theirs, ours))
    yield Row(f"{name}: step", step, "s", samples=tuple(round(each, 5) for each in theirs["steps_s"]))
    for counted, share in ours["mfu"].items():
        yield Row(f"{name}: MFU, {counted} attention", share * mine / step if share else None)
    for key in ("allocated", "reserved"):
        yield Row(f"{name}: peak {key}", theirs[f"{key}_gib"], "GiB")
    yield Row(f"{name}: speed of titan relative to it", step / mine)


def _asked(setting: Setting, name: str, sizes: dict[str, int], reshard: str) -> dict[str, Any]:
    """What `opponent.steps_of` is asked: the job of titan's turn."""
    shape = JOBS[name]
    keys = keys_of(setting, shape)
    recompute = keys.get("plugins.activation_checkpoint.mode", "none")
    return {
        **sizes,
        "seq_len": keys["data.seq_len"],
        "batch": 1,
        "micro_batches": shape.sequences,
        "steps": setting.size(speed.STEPS, 2),
        "warm_up": setting.size(2, 1),
        "device": setting.device.type,
        "dtype": "bfloat16",
        "backend": setting.size("inductor", "aot_eager"),
        "recompute": recompute,
        "reshard": reshard,
        "tokens": str(keys["data.path"]),
        "folder": str(setting.folder / "torchtitan"),
    }


def _joined(turns_taken: list[dict[str, Any]]) -> dict[str, Any]:
    """The turns of one trainer as one: all its steps, and what else the last turn said."""
    return {**turns_taken[-1], "steps_s": [step for turn in turns_taken for step in turn["steps_s"]]}
