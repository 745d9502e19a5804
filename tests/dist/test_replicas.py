"""What every tensor-parallel rank holds whole is the same on all of them: parameters, gradients, buffers, generators.

The model has every kind: norms of hidden states and of heads, biases of both linears of a pair, learned positions, a
buffer that is saved and one that is computed. `train_job` compares replicas bit by bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.jobs import SAVING, mesh
from tests.logits import logits_of
from tests.sweeps import sweep_but
from titan.config import load_job
from titan.testing.jobs import assert_same_curve, one_rank, saved_tensors, train_job
from titan.testing.ranks import RankError, run_ranks

FRILLS = Path(__file__).parents[1] / "configs" / "frills.toml"
TEST_PLUGINS = str(Path(__file__).parents[1] / "plugins")
WHOLE = ("--plugins.tensor.sequence_parallel", "false")


RECOMPUTE = ("--plugins.activation_checkpoint.mode", "full")
TWICE = ("--train.micro_batch_size", "2")
SPLIT_BACKWARD = ("--plugins.pipeline.schedule", "ZBVZeroBubble")
LAYOUTS = {
    "tp 2": (2, mesh(tp=2)),
    "tp 2, whole sequences": (2, [*mesh(tp=2), *WHOLE]),
    "tp 4, whole sequences, accumulation, recompute": (4, [*mesh(tp=4), *WHOLE, *TWICE, *RECOMPUTE]),
    "hsdp 2x2, tp 2, whole sequences": (8, [*mesh(dp_replicate=2, dp_shard=2, tp=2), *WHOLE]),
    "ddp 2, tp 2, pp 2": (8, mesh(dp_replicate=2, tp=2, pp=2)),
    "tp 2, pp 2, whole sequences, split backward": (4, [*mesh(tp=2, pp=2), *WHOLE, *SPLIT_BACKWARD]),
}


@pytest.mark.parametrize("layout", sweep_but(LAYOUTS, "tp 2", "tp 2, whole sequences"))
def test_the_curve_is_one_ranks_and_replicas_are_equal(layout: str, tmp_path: Path) -> None:
    world_size, words = LAYOUTS[layout]
    assert_same_curve(one_rank(config=FRILLS), train_job(tmp_path, world_size, *words, config=FRILLS))


def test_a_norm_of_heads_that_is_called_one_of_hidden_states_is_refused(tmp_path: Path) -> None:
    said = r'layers\.0\.attn\.q_norm as a "norm" of hidden states, 32 wide, but its parameters are 8 wide; .*"qk_norm"'
    with pytest.raises(RankError, match=said):
        train_job(tmp_path, 2, *mesh(tp=2), "--model.fault", "norm", config=FRILLS)


@pytest.mark.parametrize("words", [(), WHOLE], ids=["slices", "whole sequences"])
def test_a_technique_without_axes_sees_whole_gradients(words: tuple[str, ...], tmp_path: Path) -> None:
    train_job(tmp_path, 2, *mesh(tp=2), *words, "--plugins.witness.enabled", "true", config=FRILLS)


@contextmanager
def _memory_is_not_zero() -> Iterator[None]:
    """New storage holds sevens, so that nothing is right by chance."""
    empty = torch.empty_like
    with patch.object(torch, "empty_like", lambda *args, **more: empty(*args, **more).fill_(7)):
        yield


def _buffers(folder: str, words: list[str], config: str) -> list[str]:
    """On one rank: names of its buffers, each of which is what plain construction on the CPU gives."""
    from titan.config import load_job
    from titan.ranks.meeting.launch_env import launched_world_size
    from titan.ranks.process import join
    from titan.training.build import wire

    job = load_job(Path(config), ["--run.dir", folder, *words], launched_world_size())
    with _memory_is_not_zero():
        parts = wire(job, join(job)).parts
    meant = dict(job.model.build().named_buffers())
    held = {name: buffer for part in parts for name, buffer in part.module.named_buffers()}
    for name, buffer in held.items():
        here = buffer.to_local() if isinstance(buffer, DTensor) else buffer  # whole, in a sliced module too
        assert here.dtype == meant[name].dtype and torch.equal(here, meant[name]), name
    return list(held)


@pytest.mark.parametrize("degrees", [{}, {"dp_shard": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_buffers_are_those_of_plain_construction(degrees: dict[str, int], tmp_path: Path) -> None:
    ranks = torch.Size(degrees.values()).numel()
    words = [*mesh(**degrees), "--data.path", "nowhere"]
    held = run_ranks(_buffers, ranks, str(tmp_path), words, str(FRILLS), init=False)
    every = {f"layers.{i}.{name}" for i in range(4) for name in ("added", "ffn.up.scale", "attn.rope")}
    assert {name for own in held for name in own} == every


def test_a_buffer_without_a_value_is_refused(tmp_path: Path) -> None:
    expected = r"no initial value for buffer layers\.0\.attn\.rope; give it one in ModelSpec\.buffers"
    with pytest.raises(RankError, match=expected):
        train_job(tmp_path, 1, "--model.fault", "no value", config=FRILLS)


def _logits(checkpoint: str, tokens: Tensor) -> Tensor:
    from titan.contracts import Batch
    from titan.inference.load_model import open_job, open_trained
    from titan.ranks import process

    path, job = open_job(checkpoint, ["--plugins.path", TEST_PLUGINS], 1)
    with _memory_is_not_zero():
        trained = open_trained(path, job, process.join(job))
    logits = trained.engine.forward(Batch(tokens, tokens, None))
    assert logits is not None
    return logits


def test_saved_where_persistent_and_computed_where_not(tmp_path: Path) -> None:
    train_job(tmp_path, 4, *mesh(pp=2, tp=2), *SAVING, "--train.steps", "3", config=FRILLS)
    assert_same_curve(one_rank(config=FRILLS), train_job(tmp_path, 2, *mesh(dp_shard=2), *SAVING, config=FRILLS))

    saved = saved_tensors(tmp_path / "run" / "checkpoints" / "step-00000006")
    state = {name.removeprefix("model."): value for name, value in saved.items() if name.startswith("model.")}
    assert "layers.0.added" in state and "layers.0.attn.rope" not in state
    plain = load_job(FRILLS, ["--data.path", "nowhere"]).model.build()
    plain.load_state_dict(state)
    tokens = torch.arange(32)[None]
    [logits] = run_ranks(_logits, 1, str(tmp_path / "run"), tokens, init=False)
    assert torch.equal(logits, logits_of(plain, tokens))


@pytest.mark.parametrize("words", [[], [*mesh(pp=2), *RECOMPUTE]], ids=["one rank", "pp 2, recompute"])
def test_a_forward_that_draws_random_numbers_is_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"drew random numbers from the default generator of cpu; .* Draw by position"):
        train_job(tmp_path, 2 if words else 1, *words, "--model.fault", "dropout", config=FRILLS)


def test_a_forward_that_writes_to_a_saved_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"wrote to the persistent buffer layers\.0\.added, .* persistent=False"):
        train_job(tmp_path, 1, "--model.fault", "writes", config=FRILLS)


def _drawn(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: what the default generator gives once a run is built, and once it has ended."""
    from titan.ranks import process
    from titan.ranks.meeting.launch_env import launched_world_size
    from titan.training import build, trainer

    overrides = ["--run.dir", folder, "--data.cache", f"{folder}/cache", *words]
    job = load_job(Path(config), overrides, launched_world_size())
    run = build.build(job, process.join(job))
    state = torch.get_rng_state()
    trainer.train(run)
    assert torch.equal(state, torch.get_rng_state())
    return {"drawn": torch.rand(4)}


def test_default_generators_are_seeded_and_training_draws_nothing_from_them(tmp_path: Path) -> None:
    def drawn(seed: int, ranks: int = 1) -> Tensor:
        words = ("--run.seed", str(seed), "--train.steps", "2", "--validation.every", "1", "--validation.samples", "2")
        words += ("--validation.name", "text", "--validation.path", str(tmp_path / "text"))
        name = f"seed {seed}, {ranks} ranks"
        return train_job(tmp_path, ranks, *words, config=FRILLS, name=name, run=_drawn).weights["drawn"]

    assert torch.equal(drawn(0), drawn(0, ranks=2)) and not torch.equal(drawn(0), drawn(1))


def _goes_on(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: the state of the default generator where a run has ended, and where the run that goes on begins."""
    from titan.ranks import process
    from titan.training import build, trainer

    job = load_job(Path(config), ["--run.dir", folder, "--data.cache", f"{folder}/cache", *words])
    rank = process.join(job)
    run = build.build(job, rank)
    torch.rand(7)  # as a plugin may between steps
    trainer.train(run)
    ended = torch.get_rng_state()
    again = build.build(job, rank)
    begun = torch.get_rng_state()
    trainer.close(again)
    return {"ended": ended, "begun": begun}


def test_default_generators_go_on_where_they_were(tmp_path: Path) -> None:
    states = train_job(tmp_path, 1, *SAVING, "--train.steps", "1", run=_goes_on).weights
    assert torch.equal(states["ended"], states["begun"])
