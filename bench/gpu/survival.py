"""Resume to the bit, a stop by SIGTERM, and NaN."""

import shutil
from collections.abc import Iterator

from bench.gpu import jobs, reference
from bench.gpu.jobs import Keys
from bench.gpu.records import Row
from bench.gpu.setting import Setting
from titan.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from titan.testing.jobs import saved_tensors

STOP, NAN = 8, 13
"""The step before which SIGTERM comes, and the step whose gradient is spoilt."""


def resume(setting: Setting) -> Iterator[Row]:
    """20 steps against 10, a new start and 10 more: weights, optimizer state and rows."""
    _forget(setting, "undisturbed", "resumed")
    keys = _keys(setting)
    codes = [jobs.start(setting, "undisturbed", keys)]
    codes += [jobs.start(setting, "resumed", {**keys, "train.steps": steps}) for steps in (10, 20)]
    yield Row("exit codes", str(codes), passed=codes == [EXIT_DONE] * 3)
    yield from _same(setting, "undisturbed", "resumed")


def sigterm(setting: Setting) -> Iterator[Row]:
    """SIGTERM in the run; the same command ends it as if nothing had been."""
    _forget(setting, "undisturbed", "signalled")
    jobs.start(setting, "undisturbed", _keys(setting))
    keys = {**_keys(setting), **_plugin("send_signal"), "plugins.send_signal.step": STOP}
    first = jobs.start(setting, "signalled", {**keys, "plugins.send_signal.once": setting.folder / "rang"})
    yield Row("exit code after SIGTERM", first, passed=first == EXIT_PREEMPTED)
    second = jobs.start(setting, "signalled", {**keys, "plugins.send_signal.once": setting.folder / "rang"})
    yield Row("exit code of the same command again", second, passed=second == EXIT_DONE)
    yield from _same(setting, "undisturbed", "signalled")


def nan(setting: Setting) -> Iterator[Row]:
    """A NaN in a gradient: the run stops and saves nothing of it, or skips that update and goes on."""
    _forget(setting, "nan", "nan-skipped")
    keys = {**_keys(setting), **_plugin("inject_nan"), "plugins.inject_nan.steps": [NAN]}
    code = jobs.start(setting, "nan", keys)
    yield Row("exit code", code, passed=code == EXIT_FAILED)
    saved = sorted(path.name for path in (setting.folder / "runs" / "nan" / "checkpoints").glob("step-*"))
    yield Row("newest checkpoint is from before it", saved[-1][-8:], passed=int(saved[-1][-8:]) < NAN)
    code = jobs.start(setting, "nan-skipped", {**keys, "train.non_finite": "skip"})
    skipped = jobs.rows_of(setting, "nan-skipped")[20]["skipped_updates"]
    yield Row(
        "with non_finite = skip: exit code, skipped updates", f"{code}, {skipped}", passed=(code, skipped) == (0, 1)
    )


def _forget(setting: Setting, *names: str) -> None:
    """Remove what an earlier start has left of these runs: they would go on from it."""
    for name in names:
        shutil.rmtree(setting.folder / "runs" / name, ignore_errors=True)
    (setting.folder / "rang").unlink(missing_ok=True)


def _keys(setting: Setting) -> dict[str, object]:
    saving: Keys = {"checkpoint.enabled": True, "checkpoint.every": 5, "checkpoint.keep_latest": 0}
    return {**reference.keys_of(setting, "untied"), **saving, "run.deterministic": True}


def _plugin(name: str) -> dict[str, object]:
    return {"plugins.path": [str(jobs.PLUGINS)], f"plugins.{name}.enabled": True}


def _same(setting: Setting, one: str, other: str) -> Iterator[Row]:
    """Every tensor of the last checkpoints, and every row."""
    runs = setting.folder / "runs"
    first, second = (saved_tensors(runs / name / "checkpoints" / "step-00000020") for name in (one, other))
    differ = jobs.same_bits(first, second)
    yield Row(f"tensors of {len(first)} that differ in a bit", len(differ), passed=bool(first) and not differ)
    rows = [jobs.rows_of(setting, name) for name in (one, other)]
    apart = [
        step
        for step in rows[0].keys() | rows[1].keys()
        if any(rows[0].get(step, {}).get(key) != rows[1].get(step, {}).get(key) for key in ("loss", "grad_norm"))
    ]
    yield Row(f"rows of {len(rows[0])} that differ in a bit", len(apart), passed=bool(rows[0]) and not apart)
