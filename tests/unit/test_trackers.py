"""Trackers: what stands in the files and on the terminal, after a kill and after a resume too."""

import errno
import io
import json
import logging
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from titan.contracts import RunInfo, Tracker
from titan.plugins.trackers.console import Console
from titan.plugins.trackers.jsonl import Jsonl
from titan.plugins.trackers.tensorboard import TensorBoard

ROW: dict[str, Any] = {"step": 20, "loss": 5.12341, "grad_norm": 1.2344, "lr": 3e-3, "tokens": 81920}
ROW |= {"tokens_per_s": 12345.6, "tokens_per_s_per_device": 6172.8, "model_tflops_per_device": 0.5, "mfu": None}
ROW |= {"step_time_s": 0.1, "data_time_s": 0.001, "save_time_s": 0.5, "validation_time_s": 0.0}
ROW |= {"gc_time_s": 0.01, "peak_memory_gib": None, "time": 1.7e9}
VALIDATION = {"step": 20, "validation_loss": 5.1, "validation_perplexity": 164.02}


def _info(folder: Path, start_step: int = 0, measures: tuple[str, ...] = ()) -> RunInfo:
    config = {"train": {"steps": 600}, "data": {"paths": ["a", "b"]}}
    return RunInfo(folder, "tiny", config, start_step, steps=600, params=1000, every=10, measures=measures)


def _started(kind: type[Tracker], *info: Any, **more: Any) -> Any:
    tracker = kind(kind.Config())
    tracker.start(_info(*info, **more))
    return tracker


def _run(kind: type[Tracker], folder: Path, rows: list[dict[str, Any]], start_step: int = 0) -> None:
    tracker = _started(kind, folder, start_step)
    for row in rows:
        tracker.log(row)
    tracker.close()


def _jsonl(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _steps(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.0} for step in steps]


def test_rows_are_in_the_file_at_once_with_null_for_what_json_does_not_know(tmp_path: Path) -> None:
    tracker, odd = _started(Jsonl, tmp_path), {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf}
    for number, row in enumerate((ROW, VALIDATION, {"step": 1, **odd, "tokens": 3})):
        tracker.log(row)
        assert len(_jsonl(tmp_path)) == number + 1
    assert _jsonl(tmp_path) == [ROW, VALIDATION, {"step": 1, **dict.fromkeys(odd), "tokens": 3}]
    tracker.close()


def test_resuming_drops_rows_beyond_the_checkpoint(tmp_path: Path) -> None:
    _run(Jsonl, tmp_path, [*_steps(10, 20), VALIDATION, *_steps(30, 40)])
    _run(Jsonl, tmp_path, _steps(30, 40, 50), start_step=20)
    assert _jsonl(tmp_path) == [*_steps(10, 20), VALIDATION, *_steps(30, 40, 50)]


@pytest.mark.parametrize("torn", [b'{"step": 30, "lo', b'{"step": 20, "loss": 1.0}', b'{"st\n', b"\n"])
def test_resuming_drops_a_torn_line(tmp_path: Path, torn: bytes) -> None:
    _run(Jsonl, tmp_path, _steps(10))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    _run(Jsonl, tmp_path, _steps(20), start_step=20)
    assert _jsonl(tmp_path) == _steps(10, 20)


def test_what_a_killed_start_left_is_swept(tmp_path: Path) -> None:
    _run(Jsonl, tmp_path, _steps(1))
    (tmp_path / "metrics.jsonl.tmp").write_text("half")
    _run(Jsonl, tmp_path, [], start_step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"] and _jsonl(tmp_path) == _steps(1)


def test_the_file_is_replaced_not_rewritten_and_starts_anew_where_a_run_does(tmp_path: Path) -> None:
    _run(Jsonl, tmp_path, _steps(10, 20))
    with (tmp_path / "metrics.jsonl").open() as held:
        _run(Jsonl, tmp_path, [], start_step=10)
        assert len(held.readlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    _run(Jsonl, tmp_path, _steps(10))
    assert _jsonl(tmp_path) == _steps(10)


def test_a_row_cut_short_by_a_full_disk_is_said_and_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = _started(Jsonl, tmp_path)
    tracker.log({"step": 10})
    write, cut = os.write, os.ftruncate
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:9]))
    with pytest.raises(OSError, match="disk full"):
        tracker.log({"step": 20})
    assert _jsonl(tmp_path) == [{"step": 10}]
    monkeypatch.setattr(os, "ftruncate", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    for _ in range(2):
        with pytest.raises(OSError, match="Stale"):
            tracker.log({"step": 30})
    monkeypatch.setattr(os, "ftruncate", cut)
    monkeypatch.setattr(os, "write", write)
    tracker.log({"step": 40})
    tracker.close()
    assert _jsonl(tmp_path) == [{"step": 10}, {"step": 40}]


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def test_tags_are_the_keys_in_groups_and_unknown_values_are_left_out(tmp_path: Path) -> None:
    _run(TensorBoard, tmp_path, [{**ROW, "peak_memory_gib": 2.0, "peak_memory_rank": 3}, VALIDATION])
    events = _events(tmp_path)
    tags = {"train/loss", "train/grad_norm", "train/lr", "train/tokens", "speed/tokens_per_s", "speed/step_time_s"}
    tags |= {"speed/tokens_per_s_per_device", "speed/model_tflops_per_device", "speed/data_time_s", "speed/save_time_s"}
    tags |= {"speed/validation_time_s", "speed/gc_time_s", "memory/peak_memory_gib", "memory/peak_memory_rank"}
    assert set(events.Tags()["scalars"]) == tags | {"validation/loss", "validation/perplexity"}
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.wall_time, event.value) == (20, 1.7e9, pytest.approx(5.12341))
    (job,) = events.Tensors("config/text_summary")
    (text,) = job.tensor_proto.string_val
    assert text.decode() == "- **train**\n    - **steps** = `600`\n- **data**\n    - **paths** = `['a', 'b']`"


def test_tensorboard_forgets_what_is_beyond_the_checkpoint(tmp_path: Path) -> None:
    _run(TensorBoard, tmp_path, _steps(10, 20, 30, 40))
    _run(TensorBoard, tmp_path, [{"step": 30, "loss": 2.0}], start_step=20)
    assert [(e.step, e.value) for e in _events(tmp_path).Scalars("train/loss")] == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_row_is_in_the_event_file_at_once(tmp_path: Path) -> None:
    tracker = _started(TensorBoard, tmp_path)
    for step in range(1, 51):
        tracker.log({**ROW, "step": step})
    assert [event.step for event in _events(tmp_path).Scalars("speed/data_time_s")] == list(range(1, 51))
    tracker.close()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_when_stderr_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = _started(Console, tmp_path)
    for step in range(1, 21):
        tracker.progress(step)
    tracker.log(ROW)
    full = {"peak_memory_gib": 71.26, "peak_memory_rank": 0}
    tracker.log({**ROW, **full, "step": 599, "mfu": 0.4123, "grad_norm": None, "loss": math.nan})
    tracker.log({**ROW, **full, "peak_memory_rank": 1031})
    tracker.log(VALIDATION)
    tracker.close()
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "step 20/600  loss 5.1234  grad norm 1.234  lr 3.0e-03  12.3k tokens/s  mfu -  0.100 s/step  left 00:58",
        "step 599/600  loss nan  grad norm -  lr 3.0e-03  12.3k tokens/s  mfu 41.2%  0.100 s/step  "
        "71.3 GiB  left 00:00",
        "step 20/600  loss 5.1234  grad norm 1.234  lr 3.0e-03  12.3k tokens/s  mfu -  0.100 s/step  "
        "71.3 GiB (rank 1031)  left 00:58",
        "step 20/600  validation loss 5.1000  perplexity 164",
    ]


def test_a_bar_on_a_terminal_that_lines_and_logging_do_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    log = logging.getLogger("titan")
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(log, "handlers", [handler])
    tracker = _started(Console, tmp_path, start_step=19)
    assert "19/600" in terminal.getvalue() and "tiny" in terminal.getvalue()
    tracker.progress(20)
    tracker.log(ROW)
    log.warning("a word")
    assert "| 20/600 [" in terminal.getvalue()
    tracker.close()
    for text in ("step 20/600", "a word"):
        before, _, after = terminal.getvalue().partition(text)
        assert before.endswith("\r"), "the line stands beside the bar"
        assert "tiny: " in after, "the bar is not drawn again"
    assert log.handlers == [handler]


def test_a_line_ends_with_what_plugins_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = _started(Console, tmp_path, measures=("z_loss", "absent", "tokens_of_a_kind"))
    tracker.log({**ROW, "z_loss": 0.312345, "tokens_of_a_kind": 128})
    tracker.log(VALIDATION)
    training, validation = capsys.readouterr().err.splitlines()
    assert training.endswith("  left 00:58  z_loss 0.3123  tokens_of_a_kind 128")
    assert validation.endswith("perplexity 164")
    tracker.close()


@pytest.mark.parametrize("tracker", [Jsonl, TensorBoard, Console])
def test_closing_twice_or_before_the_start_is_harmless(tracker: Any, tmp_path: Path) -> None:
    unborn = tracker(None)
    unborn.close()
    unborn.start(_info(tmp_path))
    unborn.close()
    unborn.close()
