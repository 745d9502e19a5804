"""The fuzzer itself: what it draws, and how it judges (tests/fuzz)."""

import json
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bench import results
from tests.fuzz import __main__ as command
from tests.fuzz import judge as judging
from tests.fuzz.draw import AXES, FAULTS, METHODS, SCHEDULES, Drawn, draw, models
from tests.fuzz.judge import JOB, Judge, Verdict, write_documents
from tests.fuzz.savings import OPTIMIZERS, ROUNDINGS
from titan.config import Job, load_job, split_arguments
from titan.contracts import IGNORE
from titan.data.samples.samples import Samples
from titan.data.tokens.shards import open_shards
from titan.plugins.parallel.context.attention import positions_of
from titan.testing.jobs import Outcome
from titan.testing.ranks import RankError

DRAWS = 800
OPTIONS = frozenset[str]().union(*(model.options for model in models().values()))
EXPECTED = {
    *(f"{count} ranks" for count in range(1, 9)), *(f"{axis} > 1" for axis in AXES), "hsdp", "dp x tp x pp",
    *(f"schedule {name}" for name in SCHEDULES), *(f"virtual_stages {count}" for count in (1, 2, 3)), "split_points",
    "5 layers over 4 stages", "dim does not divide over shards", "6 heads, 3 kv heads", "tied head",
    "tied over stages", "accumulation", "dropout", "jitter", "padded experts",
    *(f"{key} {value}" for key in ("sequence_parallel", "loss_parallel") for value in ("true", "false")),
    *(f"zero_stage {stage}" for stage in (1, 2, 3)), "mode full", "mode every_n", "mode selective", "backend aot_eager",
    *(f"name {name}" for name in models()), "vocab_size 251", "packing concat", "packing document_mask", "packing pad",
    "path lively", "path barren", "workers 1", "grad_clip 0", "grad_clip 0.1", "every 2", "enabled true",
    "cp 2", "cp 4", "optimizer groups", "bf16", "fp16", "updates in backward",
    *(f"optimizer {name}" for name in OPTIMIZERS), *(f"pure bf16 {rounding}" for rounding in ROUNDINGS),
    *(f"{what} on the host" for what in ("parameters", "optimizer", "activations")),
    *(f"attention {backend}" for backend in ("auto", "math", "documents")),
    *(f"float8 {recipe}_with_gw_hp" for recipe in ("rowwise", "mxfp8")),
    *(f"mode {mode}" for mode in ("auto", "none", "attention", "budget")),
    *(f"{method} x {axis}" for method in METHODS for axis in AXES if axis != "cp"),
    *(f"{method} x {what}" for method in METHODS for what in ("documents", "recompute", "compile")),
    *({"sliding window", *(f"{method} x window" for method in METHODS)} if "sliding_window" in OPTIONS else ()),
    *(("head_dim",) if "head_dim" in OPTIONS else ()),
}  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> list[Drawn]:
    return [draw(0, index) for index in range(DRAWS)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("fuzz"))


def test_a_job_is_made_by_its_numbers_alone(drawn: list[Drawn]) -> None:
    assert draw(0, 17) == drawn[17]
    assert draw(1, 17) != replace(drawn[17], seed=1)
    assert len({repr((job.curve, job.layout)) for job in drawn}) > DRAWS * 0.9


def test_everything_is_drawn(drawn: list[Drawn]) -> None:
    found = Counter(feature for job in drawn if not job.spoilt for feature in job.features)
    assert found.keys() >= EXPECTED, EXPECTED - found.keys()
    assert {fault for job in drawn for fault in job.spoilt} == FAULTS.keys()


@pytest.mark.sweep
def test_every_job_is_taken_or_refused_in_words(drawn: list[Drawn], judge: Judge) -> None:
    verdicts = [judge.refused(job) for job in drawn]
    failed = [f"{job}\n{v.reason}" for job, v in zip(drawn, verdicts, strict=True) if v and v.kind == "failed"]
    assert not failed, failed[0]
    refused = sum(verdict is not None for verdict in verdicts)
    assert DRAWS * 0.05 < refused < DRAWS * 0.2


def test_the_command_line_is_the_job_that_was_judged(drawn: list[Drawn], judge: Judge) -> None:
    job = next(job for job in drawn if "split_points" in job.features and not job.spoilt)
    assigned, *line = shlex.split(judge.command(job))
    config, words = split_arguments(line[2:])
    loaded = load_job(config, words, job.ranks)
    assert assigned == f"NPROC={job.ranks}" and loaded.layout.world_size == job.ranks
    assert loaded.table["plugins"]["pipeline"]["split_points"] == list(job.layout["plugins.pipeline.split_points"])
    assert loaded.table["model"]["dim"] == job.curve["model.dim"]
    assert {path.suffix for path in Path(loaded.table["data"]["path"]).iterdir()} == {".bin"}


@pytest.mark.parametrize(("kind", "some_are_empty"), [("lively", False), ("barren", True)])
def test_samples_without_a_label(kind: str, some_are_empty: bool, tmp_path: Path) -> None:
    write_documents(tmp_path / kind, kind, 64)
    shards = open_shards(sorted((tmp_path / kind).glob("*.bin")))
    samples = Samples([(shards, 1.0)], seq_len=8, packing="document_mask", seed=0, shuffle=False, vocab_size=64)
    empty = [bool((sample.labels == IGNORE).all()) for sample in (samples[g] for g in range(len(samples)))]
    assert any(empty) == some_are_empty
    # A whole micro batch of them, and the step of a small global batch.
    assert any(all(empty[start : start + 4]) for start in range(len(empty) - 4)) == some_are_empty


def test_ranks_and_steps_without_a_label(drawn: list[Drawn], judge: Judge) -> None:
    ranks_without, steps_without = 0, 0
    for job in (job for job in drawn[:300] if not job.spoilt and job.curve["data.packing"] == "document_mask"):
        loaded = load_job(JOB, judge.words(job), job.ranks)
        batch = loaded.train.global_batch_size
        labels = torch.stack([sample.labels for sample in map(_samples(loaded).__getitem__, range(4 * batch))])
        cp, method = loaded.layout.degree("cp"), job.layout.get("plugins.context.method", "ring")
        method = method if cp > 1 else "ulysses"  # which takes any length
        pieces = [labels[:, positions_of(labels.shape[1], rank, cp, method)] for rank in range(cp)]
        empty = torch.stack([(piece == IGNORE).all(-1) for piece in pieces], -1)
        shares = empty.view(4, loaded.batch_ranks, -1, cp).all(2).flatten(1)
        ranks_without += shares.shape[1] > 1 and bool(shares.any())
        steps_without += bool(shares.all(-1).any())
    assert ranks_without >= 10 and steps_without >= 3


def _samples(job: Job) -> Samples:
    sources = [(open_shards(source.plugin.shards() or ()), source.weight) for source in job.sources]
    return Samples(
        sources,
        seq_len=job.data.seq_len,
        packing=job.data.packing,
        seed=job.run.seed,
        shuffle=job.data.shuffle,
        vocab_size=job.spec.vocab_size,
    )


def _outcome(norm: float = 1.0) -> Outcome:
    return Outcome({1: {"loss": 5.0, "grad_norm": norm, "tokens": 8, "lr": 1e-3}}, {"w": torch.ones(3)})


def _legal(index: int = 0) -> Drawn:
    return next(job for job in (draw(5, index + more) for more in range(99)) if not job.spoilt)


def test_jobs_of_one_curve_share_a_reference(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr(judging, "train_job", lambda *_, name, **__: names.append(name) or _outcome())
    first = _legal()
    verdicts = [judge.judge(job) for job in (first, replace(first, index=1), _legal(50))]
    assert [verdict.kind for verdict in verdicts] == ["agreed"] * 3
    assert verdicts[0].worst.items() >= {"loss": 0.0, "grad_norm": 0.0}.items()
    assert names.count("reference") == 2


def test_another_curve_fails(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "train_job", lambda *_, name, **__: _outcome(1.0 if name == "reference" else 2.0))
    verdict = judge.judge(_legal(60))
    assert verdict.kind == "failed" and "step 1: grad_norm 1.0 against 2.0" in verdict.reason


def test_a_rank_that_hangs_fails(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "train_job", Mock(side_effect=RankError("rank 1 did not end within 240 s")))
    verdict = judge.judge(_legal(70))
    assert (verdict.kind, verdict.reason) == ("failed", "rank 1 did not end within 240 s")


@pytest.mark.parametrize("spoilt", [(), ("heads",)])
def test_only_a_spoilt_job_may_be_refused(spoilt: tuple[str, ...], judge: Judge) -> None:
    job = _legal()
    job = replace(job, curve={**job.curve, "model.n_heads": 13}, spoilt=spoilt)
    verdict = judge.judge(job)
    assert verdict.kind == ("refused" if spoilt else "failed") and "n_heads 13" in verdict.reason


def test_an_error_that_is_no_refusal_fails(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "load_job", Mock(side_effect=ZeroDivisionError))
    verdict = judge.judge(replace(_legal(), spoilt=("heads",)))
    assert verdict.kind == "failed" and "ZeroDivisionError" in verdict.reason


def test_the_command_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    verdicts = {
        0: Verdict("agreed", "", {"loss": 1e-7, "grad_norm": 2e-7, "weights": 1e-8}, 1.0),
        1: Verdict("refused", "--x: [model] n_heads = 13 is odd", seconds=0.1),
        2: Verdict("agreed", "", {"loss": 3e-7, "grad_norm": 1e-7, "weights": 1e-8}, 1.0),
        3: Verdict("failed", "step 1: loss 1 against 2", seconds=1.0),
    }
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(Judge, "judge", lambda self, job: verdicts[job.index])
    monkeypatch.setattr(command, "arithmetic", lambda curve: "float32")
    monkeypatch.setattr("sys.argv", ["fuzz", "--n", "4", "--seed", "9"])
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert "python -m tests.fuzz --seed 9 --only 3" in printed and "step 1: loss 1 against 2" in printed
    (written,) = tmp_path.glob("fuzz.json")
    found = json.loads(written.read_text())
    assert [found[key] for key in ("jobs", "agreed", "refused", "failed")] == [4, 2, 1, 1]
    assert found["largest_deviation"] == {"float32": {"loss": 3e-7, "grad_norm": 2e-7, "weights": 1e-8}}
    assert found["refused_for"] == {"[model] n_heads = N is odd": 1}
    assert [row.split()[:2] for row in found["rows"]] == [[str(n), verdicts[n].kind] for n in range(4)]
    monkeypatch.setattr("sys.argv", ["fuzz", "--seed", "9", "--only", "0"])
    assert command.main() == 0 and list(tmp_path.iterdir()) == [written]
