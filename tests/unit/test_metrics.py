"""What a row says of time: all of it, and what stood beside the steps. By a clock of the test's own."""

import errno
import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

from tests.jobs import LLAMA
from titan.config import load_job
from titan.contracts import RunInfo
from titan.errors import ConfigError, ResourceError
from titan.training import metrics
from titan.training.metrics import Meter, Trackers

TOKENS = 128
INFO = RunInfo(Path(), "tiny", {}, start_step=0, steps=2, params=1, every=1)


class Clock:
    """Seconds pass when something takes them; `queued` is what the device has still to do."""

    now, queued, waits = 0.0, 0.0, 0

    def synchronize(self, device: torch.device) -> None:
        self.now, self.queued, self.waits = self.now + self.queued, 0.0, self.waits + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch.accelerator, "synchronize", clock.synchronize)
    monkeypatch.setattr(metrics, "peak_memory_gib", lambda device: 0.0)
    return clock


def meter(device: str) -> Meter:
    spec = load_job(LLAMA, ["--data.path", "tests"]).spec
    return Meter(spec, 16, 1, torch.device(device), stated_peak=1.0)


def row(meter: Meter) -> dict[str, float]:
    return dict(meter.row(10, 1.0, 1.0, 1e-3, 10 * TOKENS, 0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_speed_is_over_all_of_the_wall_clock(clock: Clock, device: str) -> None:
    measured = meter(device)
    for _ in range(10):
        clock.now += 0.1
        measured.add(TOKENS, data_s=0.01)
    for what, seconds in (("save", 3.0), ("validation", 5.0), ("gc", 1.0), ("save", 0.5)):
        with measured.beside(what):
            clock.now += seconds
    found = row(measured)
    assert found["tokens_per_s"] == pytest.approx(10 * TOKENS / 10.5)
    assert found["step_time_s"] == pytest.approx(1.05)
    assert found["data_time_s"] == pytest.approx(0.01)
    beside = [found[f"{what}_time_s"] for what in ("save", "validation", "gc")]
    assert beside == pytest.approx([3.5, 5.0, 1.0])
    clock.now += 0.2
    measured.add(TOKENS, data_s=0.0)
    found = row(measured)
    assert found["tokens_per_s"] == pytest.approx(TOKENS / 0.2)
    assert [found[f"{what}_time_s"] for what in ("save", "validation", "gc")] == [0, 0, 0]


def test_work_queued_on_the_device_is_the_steps(clock: Clock) -> None:
    measured = meter("cuda")
    for _ in range(10):
        clock.now, clock.queued = clock.now + 0.01, clock.queued + 0.2
        measured.add(TOKENS, data_s=0.0)
    with measured.beside("gc"):
        clock.now += 0.05
    assert clock.waits == 0, "steps and garbage collection wait for no device"
    with measured.beside("validation"):
        clock.synchronize(torch.device("cuda"))  # as reading the loss does
        clock.now += 5.0
    found = row(measured)
    assert found["validation_time_s"] == pytest.approx(5.0)
    assert found["gc_time_s"] == pytest.approx(0.05)
    assert found["tokens_per_s"] == pytest.approx(10 * TOKENS / (0.1 + 2.0 + 0.05 + 5.0))


@pytest.mark.parametrize(("system", "unit"), [("linux", 2**10), ("darwin", 1)])
def test_the_resident_set_is_counted_in_the_systems_unit(
    system: str, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    usage = SimpleNamespace(ru_maxrss=3 * 2**30 // unit)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert metrics.peak_memory_gib(torch.device("cpu")) == 3.0
    found = row(meter("cpu"))
    assert (found["peak_memory_gib"], found["peak_memory_rank"]) == (3.0, 0), "one rank asks nobody"


def test_what_fails_is_booked_too(clock: Clock) -> None:
    measured = meter("cpu")
    with pytest.raises(OSError), measured.beside("save"):
        clock.now += 2.0
        raise OSError
    assert row(measured)["save_time_s"] == 2.0


@pytest.mark.parametrize(("number", "raised"), [(errno.ESTALE, ResourceError), (errno.EISDIR, ConfigError)])
def test_a_tracker_that_cannot_begin_refuses_the_run(number: int, raised: type[Exception]) -> None:
    stale = Mock(**{"start.side_effect": OSError(number, os.strerror(number), "metrics.jsonl")})
    stale.name = "failing"
    with pytest.raises(raised, match=r"\[metrics\.failing\] cannot start: .*metrics\.jsonl.*; enabled = false"):
        Trackers([stale]).start(INFO)


def test_a_tracker_that_fails_is_told_once_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(metrics.log, "warning", said.append)
    full = OSError(errno.ENOSPC, "No space left on device\nand more")
    failing, other = Mock(**{f"{hook}.side_effect": full for hook in ("progress", "log", "close")}), Mock()
    failing.name = "failing"
    trackers = Trackers([failing, other])
    trackers.start(INFO)
    for step in (1, 2):
        trackers.progress(step)
        trackers.log({"step": step})
    trackers.close()
    steps = [asked for step in (1, 2) for asked in (call.progress(step), call.log({"step": step}))]
    assert failing.mock_calls == other.mock_calls == [call.start(INFO), *steps, call.close()]
    assert said == [
        "[metrics.failing] OSError: [Errno 28] No space left on device; "
        "training continues, and this tracker misses some rows"
    ]
