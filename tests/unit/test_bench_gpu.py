"""`python -m bench.gpu`: results over interrupted calls, a process per measurement, predictions, and a rehearsal."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import isolated, jobs, predictions, records, shapes, speed, steps
from bench.gpu.measurements import CALLS, MEASUREMENTS
from bench.gpu.records import Measurement, Results, Row
from bench.gpu.setting import Setting
from tests.commands import run_titan
from titan.machine import ALLOCATOR
from titan.plugins.models.llama import Llama

Capsys = pytest.CaptureFixture[str]
HERE = {"rehearsal": True, "device": "a CPU", "torch": "2"}
SEEN = Row("speed", 1.0, "TFLOP/s", samples=(0.9, 1.0, 1.1))


@pytest.fixture(autouse=True)
def _environment_of_a_call_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOCATOR, "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _measurement(
    name: str, measure: Callable[[Setting], Iterator[Row]] = lambda _: iter([]), seconds: float = 1.0
) -> Measurement:
    return Measurement(name, "a", seconds, "", measure)


def _results(folder: Path, **about: object) -> Results:
    return Results(folder / "gpu.jsonl", {**HERE, **about}, {"commit": "abc"})


def test_a_second_start_takes_new_ones_then_failed_ones_then_those_that_ended_the_process(tmp_path: Path) -> None:
    done, failed, killed, new = every = [_measurement(name) for name in ("done", "failed", "killed", "new")]
    results = _results(tmp_path)
    for one in (done, failed, killed):
        results.began(one)
        results.add(one, SEEN)
    results.ended(done, 1.0)
    results.ended(failed, 1.0, "RuntimeError: out of memory")
    results.path.write_text(results.path.read_text() + '{"name": "torn')
    again = _results(tmp_path)
    assert again.order(every) == [new, failed, killed]
    last = again.last()
    assert records.faults(every, last) == ["failed: RuntimeError: out of memory", "killed: began", "new: not measured"]
    assert last["killed"].rows == [SEEN] and last["killed"].head["commit"] == "abc"
    assert "FAILED: RuntimeError: out of memory" in records.table(failed, last["failed"])
    again.began(new)
    again.ended(new, 1.0)
    assert _results(tmp_path).last()["new"].status == "done"
    assert _results(tmp_path, device="an H100").order(every) == every


def test_a_check_that_did_not_pass_is_a_fault_and_is_taken_again_and_earlier_visits_count(tmp_path: Path) -> None:
    one, other, results = _measurement("one"), _measurement("other"), _results(tmp_path)
    for each in (one, other):
        results.began(each)
        results.add(each, Row("check", "no", passed=each is other))
        results.ended(each, 1.0)
    assert results.order([one]) == [one] and records.faults([one], results.last()) == ["one: check: no"]
    later = Results(tmp_path / "new.jsonl", HERE, {}, [results.path])
    assert not later.order([other]) and not later.path.exists()


def test_names_are_unique_and_the_calls_fit_their_time() -> None:
    assert len({one.name for one in MEASUREMENTS}) == len(MEASUREMENTS)
    for call, most in zip(CALLS, (150, 850, 850), strict=True):
        assert 0 < sum(one.seconds for one in MEASUREMENTS if one.call == call) <= most


def test_a_call_returns_what_it_computes_and_prints_to_the_log(tmp_path: Path) -> None:
    def work() -> list[int]:
        print("hello", flush=True)
        return [os.getpid()]

    (pid,) = isolated.call(work, tmp_path / "log.txt", 60.0)
    assert pid != os.getpid() and (tmp_path / "log.txt").read_text() == "hello\n"


def _fails() -> None:
    raise RuntimeError("CUDA error: device-side assert triggered\nmore lines")


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (_fails, "^RuntimeError: CUDA error: device-side assert triggered$"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "^killed by SIGKILL$"),
        (lambda: os._exit(3), "^exit code 3$"),
        (lambda: {1, 2}, "^TypeError: Object of type set is not JSON serializable$"),
    ],
)
def test_a_call_without_a_result_says_why(work: Callable[[], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(isolated.CallError, match=message):
        isolated.call(work, tmp_path / "log.txt", 60.0)


def test_a_call_that_hangs_shows_its_stacks_and_those_of_a_call_within_and_ends_both(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"

    def hangs_within() -> None:
        deaf = "import signal, time; signal.signal(signal.SIGQUIT, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        (tmp_path / "pids").write_text(f"{os.getpid()} {child.pid}")
        threading.Event().wait()

    with pytest.raises(isolated.CallError, match="took longer than 2 s"):
        isolated.call(lambda: isolated.call(hangs_within, log, 60.0), log, 2.0)
    assert "hangs_within" in log.read_text() and "has_ended" in log.read_text()
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in (tmp_path / "pids").read_text().split()):
        assert time.monotonic() < deadline, "the call within, or what it started, goes on"


def test_calls_run_beside_each_other_and_one_that_fails_ends_no_other(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()

    def meets(number: int) -> int:
        (meeting / str(number)).touch()
        while len(list(meeting.iterdir())) < 2:
            time.sleep(0.01)
        return number

    works = [lambda: meets(0), lambda: meets(1), _fails]
    results = dict(isolated.calls(works, tmp_path / "log.txt", 60.0, at_once=2))
    assert results[0] == 0 and results[1] == 1 and isinstance(results[2], isolated.CallError)


def test_a_fault_or_a_kill_ends_one_measurement_and_a_second_start_takes_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"

    def good(_: Setting) -> Iterator[Row]:
        with taken.open("a") as file:
            file.write("good\n")
        yield SEEN

    def killed(_: Setting) -> Iterator[Row]:
        yield SEEN
        os.kill(os.getpid(), signal.SIGKILL)

    def broken(_: Setting) -> Iterator[Row]:
        yield Row("before the fault", 2.0)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    planted = [_measurement(name, of) for name, of in (("killed", killed), ("broken", broken), ("good", good))]
    planted.append(_measurement("too long", good, seconds=1e9))
    monkeypatch.setattr(command, "MEASUREMENTS", planted)
    monkeypatch.setattr(command.reference, "make", lambda _: None)
    monkeypatch.setattr(command.results, "about", lambda: {"device": "cuda", "torch": "2", "commit": "abc"})
    words = ["--results", str(tmp_path / "gpu.jsonl"), "--scratch", str(tmp_path), "--seconds", "60"]
    for _ in range(2):
        assert command.main(words) == 1
        assert taken.read_text() == "good\n"
    last = records.attempts(records.read(tmp_path / "gpu.jsonl"))
    assert [last[name].status for name in ("killed", "broken", "good")] == ["failed", "failed", "done"]
    assert last["killed"].rows == [SEEN] and last["killed"].failure == "killed by SIGKILL"
    assert last["broken"].rows and "illegal memory access" in last["broken"].failure
    printed = capsys.readouterr().out
    assert "already measured on this device (--again measures anyway): good" in printed
    assert "too long: left for the next start" in printed and "4 measurements, 3 not passed" in printed
    assert command.main([*words, "--again", "--only", "good"]) == 0
    assert taken.read_text().count("good") == 2


def test_what_is_counted_and_made_for_measurements(tmp_path: Path) -> None:
    """Spans that overlap once, half of the square of attention, and the same tokens each time."""
    assert steps.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    first, second = (jobs.tokens(tmp_path / name, jobs.BYTE, 1 << 12) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    spec = Llama(Llama.Config(n_layers=2, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=128)).spec()
    full, causal = shapes.flops_per_step(spec, 128).values()
    without_attention = 6 * (2 * spec.matmul_params_per_layer + spec.head_matmul_params) * 128
    assert full - causal == pytest.approx(causal - without_attention)


def test_a_table_has_the_newest_prediction_that_is_older_than_the_measurement(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    dated = (("h100", 1, 0.3), ("h100", 2, 0.2), ("h100", 4, 0.1), ("h200", 2, 9.0))
    same = {"job": "1B", "allocated_gib": 1.0, "reserved_gib": 1.0}
    lines = [{**same, "cluster": name, "date": f"2026-01-0{day}", "step_s": step} for name, day, step in dated]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [Row("1B: step", 0.25, "s"), Row("1B: peak reserved", None, "GiB")]
    last = {"speed": records.Record("done", {"time": "2026-01-03"}, rows)}
    table = predictions.table("NVIDIA H100 80GB HBM3", last, path)
    assert table.splitlines()[2:] == ["| 1B | step | 0.2 s | 0.25 s | 0.80 |"]


@pytest.mark.parametrize("cluster", predictions.CLUSTERS)
def test_every_measured_job_fits_by_its_plan(cluster: str) -> None:
    limit = predictions.cluster.load(cluster).memory.limit_gib
    for name, shape in shapes.JOBS.items():
        planned = predictions.predicted(cluster, shape)
        assert planned["allocated_gib"] < planned["reserved_gib"] < limit and planned["step_s"] > 0, name


@pytest.mark.slow
@pytest.mark.sweep
def test_a_rehearsal_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """In processes that have done nothing else, as whatever is measured is forked from them."""
    first, more = ["generators", "loss"], ["experts", "nan"]
    words = ["--rehearse", "--scratch", str(tmp_path), "--results", str(tmp_path / "gpu.jsonl"), "--only", *first]
    for given in (words, [*words, *more]):
        done = run_titan(given, tmp_path, module="bench.gpu.__main__")
        assert done.returncode == 0, (done.stdout, done.stderr, (tmp_path / "log.txt").read_text())
    began = [line["name"] for line in records.read(tmp_path / "gpu.jsonl") if line["event"] == "began"]
    assert sorted(began) == sorted([*first, *more])
    assert f"{len(first + more)} measurements, 0 not passed" in done.stdout


@pytest.mark.slow
def test_the_loader_is_measured_beside_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.REHEARSED, "plugins.compile.enabled", False)  # tracing warns, an error in tests
    setting = Setting(tmp_path, tmp_path, tmp_path / "log.txt", rehearse=True)
    rows = {row.label: row.value for row in speed.loader(setting)}
    for packing in ("concat", "document_mask"):
        rate, ratio = rows.pop(f"{packing}: loader"), rows.pop(f"{packing}: loader, relative to training")
        assert rate > ratio > 0, "training takes more than one token per second"
    assert not rows


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "memory", "--call", "a"], "--only memory: none of them is in call a"),
        (["--results", "/proc/none/gpu.jsonl"], "choose other --results"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], said: str, tmp_path: Path, capsys: Capsys) -> None:
    assert command.main([*words, "--scratch", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-4", "nan", "inf", "soon"])
def test_a_deadline_is_above_0(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--seconds", seconds])
    assert f"{seconds} is not a number of seconds above 0" in capsys.readouterr().err


def test_two_starts_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert command.main(["--rehearse", "--results", str(tmp_path / "gpu.jsonl"), "--scratch", str(tmp_path)]) == 2
    assert f"another start of bench.gpu uses {tmp_path}" in capsys.readouterr().err


def test_a_table_touches_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text('42\n{"name": "torn')
    results = Results(path, {**HERE, "rehearsal": False, "device": "NVIDIA H100 80GB HBM3"}, {"commit": "abc"})
    results.began(MEASUREMENTS[1])
    results.add(MEASUREMENTS[1], Row("1B: step", 0.2, "s"))
    assert command.main(["--table", "--results", str(path)]) == 0
    assert "NVIDIA H100 80GB HBM3\n" in (printed := capsys.readouterr().out) and "| 1B | step |" in printed
