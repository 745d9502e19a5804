"""`python -m bench.gpu`: the results file over interrupted starts, its arithmetic, and a rehearsal of some of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu import __main__ as command
from bench.gpu import jobs, shapes, speed, steps
from bench.gpu.measurements import MEASUREMENTS
from bench.gpu.records import Measurement, Results, Row
from bench.gpu.setting import Setting
from tests.sweeps import swept_case
from titan.plugins.models.llama import Llama

HERE = {"rehearsal": True, "device": "a CPU", "torch": "2"}


def _rows(_: Setting) -> Iterator[Row]:
    yield Row("speed", 1.0, "TFLOP/s")
    yield Row("check", "no", passed=False)


def _measurements(*names: str) -> list[Measurement]:
    return [Measurement(name, 1, 1.0, "", _rows) for name in names]


def test_a_second_start_takes_new_ones_then_failed_ones_then_those_that_ended_the_process(tmp_path: Path) -> None:
    done, failed, killed, new = every = _measurements("done", "failed", "killed", "new")
    results = Results(tmp_path, HERE)
    for one in (done, failed, killed):
        results.began(one)
    results.ended(done, [Row("a", 1.0)], 1.0)
    results.ended(failed, [Row("b", 2.0)], 1.0, "RuntimeError: out of memory")
    results.path.write_text(results.path.read_text() + '{"name": "torn')
    again = Results(tmp_path, HERE)
    assert again.order(every) == [new, failed, killed]
    assert again.faults(every) == ["failed: RuntimeError: out of memory", "killed: began", "new: not measured"]
    assert "FAILED: RuntimeError: out of memory" in again.table(failed) and " 2" in again.table(failed)
    again.ended(new, [], 1.0)
    assert Results(tmp_path, HERE).status("new") == "done"
    assert Results(tmp_path, {**HERE, "device": "an H100"}).order(every) == every


def test_a_check_that_did_not_pass_is_a_fault_and_is_taken_again(tmp_path: Path) -> None:
    (one,), results = _measurements("one"), Results(tmp_path, HERE)
    results.ended(one, list(_rows(Setting(tmp_path, tmp_path, True))), 1.0)
    assert results.order([one]) == [one] and results.faults([one]) == ["one: check: no"]


def test_names_are_unique_and_each_part_fits_its_time() -> None:
    assert len({one.name for one in MEASUREMENTS}) == len(MEASUREMENTS)
    for part in (1, 2, 3, 4):
        assert 0 < sum(one.seconds for one in MEASUREMENTS if one.part == part) < 9 * 60


def test_spans_that_overlap_count_once() -> None:
    assert steps.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_the_causal_count_leaves_out_half_of_the_square() -> None:
    spec = Llama(Llama.Config(n_layers=2, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=128)).spec()
    full, causal = shapes.flops_per_step(spec, 128).values()
    without_attention = 6 * (2 * spec.matmul_params_per_layer + spec.head_matmul_params) * 128
    assert full - causal == pytest.approx(causal - without_attention)


def test_tokens_are_the_same_each_time(tmp_path: Path) -> None:
    first, second = (jobs.tokens(tmp_path / name, jobs.BYTE, 1 << 12) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "more"), [(["generators"], ["nan"]), swept_case((["generators", "loss"], ["waits", "nan"]))]
)
def test_a_rehearsal_goes_on_where_the_last_one_ended(
    first: list[str], more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rehearse", "--output", str(tmp_path)]
    assert command.main([*words, "--only", *first]) == 0
    assert command.main([*words, "--only", *first, *more]) == 0
    names = [json.loads(line)["name"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert names == [name for name in sorted([*first, *more]) for _ in range(2)]
    assert f"{len(first + more)} measurements, 0 not passed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_loader_is_measured_beside_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.REHEARSED, "plugins.compile.enabled", False)  # tracing warns, an error in tests
    rows = {row.label: row.value for row in speed.loader(Setting(tmp_path, tmp_path, rehearse=True))}
    for packing in ("concat", "document_mask"):
        rate, ratio = rows.pop(f"{packing}: loader"), rows.pop(f"{packing}: loader, relative to training")
        assert rate > ratio > 0, "training takes more than one token per second"
    assert not rows
