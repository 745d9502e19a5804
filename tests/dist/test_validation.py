"""Validation: the value is right, the same at any layout, and training does not notice it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.jobs import FOUR_LAYERS, LLAMA, SAVING, mesh, settings
from tests.logits import logits_of
from tests.sweeps import swept_case
from titan.config import load_job
from titan.data.open import open_validation
from titan.data.samples.order import in_epochs, mix
from titan.ranks import process
from titan.testing.jobs import Outcome, read_rows, saved_tensors, train_job, write_text
from titan.testing.ranks import RankError, run_ranks
from titan.training import build, trainer
from titan.training.validation import validate

SAMPLES = 13
"""Not a multiple of anything: the last batches of all layouts but the smallest are filled up."""

ZERO = "--plugins.fsdp.zero_stage"
STEPS = ("--train.steps", "5")
NUMBERS = ("loss", "grad_norm", "lr", "tokens")


def validation(folder: Path, every: int = 1) -> list[str]:
    split = folder / "split"
    if not split.exists():
        write_text(split)
        for number in range(6):
            (split / f"{number:02}.txt").unlink()
    words = {"every": every, "samples": SAMPLES, "name": "text", "path": split}
    return [word for key, value in words.items() for word in (f"--validation.{key}", str(value))]


def validated(run: Path) -> dict[int, float]:
    return {step: row["validation_loss"] for step, row in read_rows(run).items() if "validation_loss" in row}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("one")
    train_job(folder, 1, *validation(folder), *STEPS)
    return validated(folder / "run")


def assert_booked(run: Path) -> None:
    """Speed is tokens over wall clock; the validation after each step and the save after step 4 stand beside it."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = {row["step"]: row for row in found if "loss" in row}
    tokens = rows[5]["tokens"] / 5
    seconds = sum(tokens / rows[step]["tokens_per_s"] for step in range(2, 6))
    beside = [rows[step]["validation_time_s"] + rows[step]["save_time_s"] for step in range(2, 6)]
    assert seconds == pytest.approx(rows[5]["time"] - rows[1]["time"], abs=1e-5)
    assert all(0 < beside[step - 2] < tokens / rows[step]["tokens_per_s"] for step in range(2, 6))
    assert [step for step in rows if rows[step]["save_time_s"]] == [5]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        swept_case((1, ["--plugins.compile.backend", "aot_eager", "--train.micro_batch_size", "4"])),
        (2, [*mesh(cp=2), ZERO, "3", "--loss.chunk_tokens", "5"]),
        swept_case((3, [*mesh(dp_shard=3), ZERO, "3", "--train.global_batch_size", "6"])),
        swept_case((2, [*mesh(tp=2), "--plugins.activation_checkpoint.mode", "full", "--loss.chunk_tokens", "5"])),
        swept_case((4, [*mesh(dp_shard=2, pp=2), *FOUR_LAYERS, "--plugins.pipeline.schedule", "ZBVZeroBubble"])),
        (2, [*mesh(pp=2), "--loss.chunk_tokens", "5"]),
    ],
    ids=lambda words: "" if isinstance(words, int) else " ".join(words).replace("--", ""),
)
def test_training_does_not_notice(ranks: int, words: list[str], tmp_path: Path, one_rank: dict[int, float]) -> None:
    without = train_job(tmp_path, ranks, *words, *STEPS, *SAVING, name="without")
    with_it = train_job(tmp_path, ranks, *words, *STEPS, *SAVING, *validation(tmp_path), name="with")
    for step in range(1, 6):
        assert [without.rows[step][key] for key in NUMBERS] == [with_it.rows[step][key] for key in NUMBERS]
    for folder in ("step-00000004", "step-00000005"):
        ours, theirs = (saved_tensors(tmp_path / name / "checkpoints" / folder) for name in ("without", "with"))
        assert ours.keys() == theirs.keys() and ours
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert_booked(tmp_path / "with")
    fullest = {row["peak_memory_rank"] for row in with_it.rows.values()}
    assert fullest <= set(range(ranks)) and all(row["peak_memory_gib"] > 0 for row in with_it.rows.values())
    found = validated(tmp_path / "with")
    assert sorted(found) == [1, 2, 3, 4, 5]
    if layers := settings(words, "--model.n_layers"):
        alone = train_job(tmp_path, 1, *layers, *STEPS, *validation(tmp_path), name="alone")
        assert found == pytest.approx(validated(alone.folder), rel=1e-5)
    elif "--train.global_batch_size" not in words:
        assert found == pytest.approx(one_rank, rel=1e-5)


def direct(outcome: Outcome, folder: Path) -> float:
    """The loss on the first samples of the fixed order, from the weights alone."""
    job = load_job(LLAMA, ["--data.path", str(folder)])
    model = job.model.build()
    model.load_state_dict(outcome.weights)
    ids = [id for file in sorted(folder.iterdir()) for id in (*file.read_bytes(), 256)]
    windows = [ids[start : start + 17] for start in range(0, len(ids) - 16, 16)]
    assert len(windows) > 2 * SAMPLES
    rows = torch.tensor([windows[in_epochs(i, len(windows), key=mix(0, 0), shuffle=True)] for i in range(SAMPLES)])
    logits = logits_of(model, rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_the_value_is_the_mean_over_exactly_those_samples(tmp_path: Path) -> None:
    outcome = train_job(tmp_path, 1, *validation(tmp_path, every=4), *STEPS, "--run.seed", "3")
    found = validated(tmp_path / "run")
    assert sorted(found) == [4, 5], "every four steps, and at the end"
    assert found[5] == pytest.approx(direct(outcome, tmp_path / "split"), rel=1e-6)


@pytest.mark.parametrize("packing", ["document_mask", "pad"])
def test_samples_of_uneven_numbers_of_tokens(packing: str, tmp_path: Path) -> None:
    more, found = [*validation(tmp_path), "--data.packing", packing, "--train.steps", "2"], []
    for number, words in enumerate(([], mesh(dp_shard=2), mesh(pp=2))):
        outcome = train_job(tmp_path, 2 if words else 1, *words, *more, name=f"run{number}")
        found.append(validated(outcome.folder))
        assert found[number] == pytest.approx(found[0], rel=1e-5)
    job = load_job(LLAMA, ["--data.path", "x", "--data.cache", f"{tmp_path}/cache", *more])
    samples, model = open_validation(job, process.Rank(0, 1, 0, torch.device("cpu"))), job.model.build()
    assert samples is not None
    model.load_state_dict(outcome.weights)
    nats = tokens = 0.0
    for sample in (samples[number] for number in range(SAMPLES)):
        documents = None if sample.documents is None else sample.documents[None]
        logits = logits_of(model, sample.tokens[None], documents)[0]
        nats += nn.functional.cross_entropy(logits, sample.labels, reduction="sum").item()
        tokens += (sample.labels >= 0).sum().item()
    assert tokens < SAMPLES * 16
    assert found[0][2] == pytest.approx(nats / tokens, rel=1e-5)


def test_going_on_validates_the_same_samples(tmp_path: Path) -> None:
    train_job(tmp_path, 1, *validation(tmp_path), *SAVING, *STEPS, name="whole")
    for steps in ("2", "5"):
        train_job(tmp_path, 1, *validation(tmp_path), *SAVING, "--train.steps", steps, name="pieces")
    assert validated(tmp_path / "pieces") == validated(tmp_path / "whole")


def kinds_of_parameters(overrides: list[str]) -> tuple[set[str], bool]:
    """On one rank: the types of the model's parameters after a validation, and whether it is in training mode."""
    run = build.build(job := load_job(LLAMA, overrides, 2), process.join(job))
    validate(run)
    trainer.close(run)
    return {type(p).__name__ for part in run.parts for _, p in part.parameters()}, run.parts[0].module.training


def logits_at_a_time(overrides: list[str]) -> set[int]:
    """On one rank: of how many tokens a validation makes logits at a time."""
    run = build.build(job := load_job(LLAMA, overrides, 2), process.join(job))
    tokens, compute = set[int](), run.job.loss.compute

    def counted(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens.add(labels.numel())
        return compute(logits, labels)

    run.job.loss.compute = counted  # type: ignore[method-assign]
    validate(run)
    trainer.close(run)
    return tokens


@pytest.mark.parametrize("words", [mesh(tp=2), swept_case(mesh(cp=2)), mesh(pp=2)], ids=["tp", "cp", "pp"])
def test_there_are_no_more_logits_at_a_time_than_in_training(words: list[str], tmp_path: Path) -> None:
    text = validation(tmp_path)
    places = ["--run.dir", str(tmp_path), "--data.cache", str(tmp_path), "--data.path", text[-1]]
    found = run_ranks(logits_at_a_time, 2, [*places, *text, *words, "--loss.chunk_tokens", "5"], init=False)
    assert [max(tokens, default=0) for tokens in found] == [0 if "--mesh.pp" in words else 5, 5]


@pytest.mark.parametrize("words", [[*mesh(dp_shard=2), ZERO, "1"], mesh(dp_replicate=2)], ids=["fsdp", "ddp"])
def test_nothing_that_was_gathered_is_kept(words: list[str], tmp_path: Path) -> None:
    text = validation(tmp_path)
    places = ["--run.dir", str(tmp_path), "--data.cache", str(tmp_path), "--data.path", text[-1]]
    found = run_ranks(kinds_of_parameters, 2, [*places, *text, *words], init=False)
    assert found == [({"DTensor"}, True)] * 2


def test_data_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="nowhere: no such file or folder"):
        train_job(tmp_path, 2, *validation(tmp_path), "--validation.path", str(tmp_path / "nowhere"))
