"""Mixtures of experts have one curve at any layout, against one rank; and what experts do between steps."""

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.jobs import DECAYING, FOUR_LAYERS, LLAMA, MOE, SAVING, THREE_STEPS, mesh, run_with_biases, settings
from tests.sweeps import sweep_but, swept_case
from titan.config import load_job
from titan.errors import ConfigError
from titan.testing.jobs import assert_same_curve, differences, train_job

TWICE = ("--train.micro_batch_size", "1")
COMPILED = ("--plugins.compile.backend", "aot_eager")
RECOMPUTE = "--plugins.activation_checkpoint.mode"
WHOLE_SEQUENCES = ("--plugins.tensor.sequence_parallel", "false")
ZERO_BUBBLE = (*FOUR_LAYERS, "--plugins.pipeline.schedule", "InterleavedZeroBubble")
LAYOUTS = {
    "accumulation": (1, ["--train.micro_batch_size", "2"]),
    "dp_shard 2": (2, mesh(dp_shard=2)),
    "tp 2": (2, mesh(tp=2)),
    "tp 2, whole sequences": (2, [*mesh(tp=2), *WHOLE_SEQUENCES]),
    "pp 2": (2, mesh(pp=2)),
    "cp 2": (2, mesh(cp=2)),
    "recompute full": (1, [RECOMPUTE, "full"]),
    "recompute selective": (1, [RECOMPUTE, "selective"]),
    "compiled": (1, COMPILED),
    "compiled, recompute selective": (1, [*COMPILED, RECOMPUTE, "selective"]),
    "compiled, recompute full": (1, [*COMPILED, RECOMPUTE, "full"]),
}
LEFT_OUT = (
    ("cp 2", "sequence"),  # is refused
    ("accumulation", "sequence"),
    ("dp_shard 2", "bias"),
    ("recompute selective", "sequence"),
    ("compiled", "bias"),
    ("compiled, recompute selective", "sequence"),
    ("compiled, recompute full", "sequence"),
)
"""The balance of a pair that is here takes the same way through what the layout adds."""

PAIRS = [pair for pair in product(LAYOUTS, ("bias", "sequence")) if pair not in LEFT_OUT]
KEPT = (("accumulation", "bias"), ("dp_shard 2", "sequence"), ("tp 2", "bias"), ("tp 2", "sequence"))
KEPT += (("tp 2, whole sequences", "bias"), ("pp 2", "sequence"), ("cp 2", "bias"), ("recompute selective", "bias"))


@pytest.mark.parametrize(("layout", "balance"), sweep_but(PAIRS, *KEPT))
def test_one_curve(layout: str, balance: str, same_curve) -> None:
    ranks, words = LAYOUTS[layout]
    same = ("--model.balance", balance, "--model.balance_rate", "0.01")
    same_curve(ranks, [*same, *words], same, MOE)


ZERO = "--plugins.fsdp.zero_stage"
FOLDED = {
    "ep 2 of dp_shard 2": (2, mesh(dp_shard=2, ep=2)),
    "ep 2 of dp_shard 4": (4, mesh(dp_shard=4, ep=2)),
    "ep 2 of dp_shard 4, zero 1, accumulation": (4, [*mesh(dp_shard=4, ep=2), ZERO, "1", *TWICE]),
    "ep 2 of dp_shard 4, zero 3, accumulation": (4, [*mesh(dp_shard=4, ep=2), ZERO, "3", *TWICE]),
    "ep 2, tp 2": (4, mesh(dp_shard=2, ep=2, tp=2)),
    "ep 2, tp 2, whole sequences, recompute selective": (
        4,
        [*mesh(dp_shard=2, ep=2, tp=2), *WHOLE_SEQUENCES, RECOMPUTE, "selective"],
    ),
    "ep 2, pp 2, zero bubble": (4, [*mesh(dp_shard=2, ep=2, pp=2), *ZERO_BUBBLE]),
    "pp 2, zero bubble, nothing sharded": (2, [*mesh(pp=2), *ZERO_BUBBLE]),
    "more ranks than experts": (8, mesh(dp_shard=8)),
    "ep 2 of cp 2": (2, mesh(cp=2, ep=2)),
    "ep 2, hsdp 2x2": (4, mesh(dp_replicate=2, dp_shard=2, ep=2)),
    "ep 2, dp_shard 2, tp 2, pp 2": (8, mesh(dp_shard=2, ep=2, tp=2, pp=2)),
    "ep 4 of dp_shard 2, cp 2, tp 2": (8, mesh(dp_shard=2, cp=2, ep=4, tp=2)),
}


@pytest.mark.parametrize("layout", sweep_but(FOLDED, "ep 2 of dp_shard 2", "ep 2 of dp_shard 4", "ep 2, tp 2"))
def test_folded(layout: str, same_curve) -> None:
    ranks, words = FOLDED[layout]
    same = ("--model.balance", "bias", "--model.balance_rate", "0.01")
    same_curve(ranks, [*same, *words], (*same, *settings(words, "--model.n_layers")), MOE)


JITTERED = {
    "pp 2, compiled": (2, [*mesh(pp=2), *COMPILED]),
    "cp 2, recompute selective": (2, [*mesh(cp=2), RECOMPUTE, "selective"]),
    "ep 2, tp 2, recompute full": (4, [*mesh(dp_shard=2, ep=2, tp=2), RECOMPUTE, "full"]),
}


@pytest.mark.parametrize("layout", sweep_but(JITTERED, "cp 2, recompute selective"))
def test_jitter(layout: str, one_rank, same_curve) -> None:
    """What the routers see is multiplied by the same random numbers at any layout."""
    ranks, words = JITTERED[layout]
    same = (*FOUR_LAYERS, "--model.router_jitter", "0.2")
    jittered = same_curve(ranks, [*same, *words], same, MOE)
    plain = one_rank(*THREE_STEPS, *DECAYING, *FOUR_LAYERS, config=MOE)
    assert differences(plain, jittered), "a curve without jitter is another one"


FULL, PADDED = ("--data.seq_len", "16"), ("--data.seq_len", "32")
PADDINGS = {
    "one rank, sequence, sigmoid": (1, ["--train.micro_batch_size", "2", "--model.router", "sigmoid"], "sequence"),
    "one rank, none": (1, [], "none"),
    "compiled": (1, [*COMPILED, RECOMPUTE, "selective"], "bias"),
    "recompute full": (1, [RECOMPUTE, "full"], "sequence"),
    "ep 2, tp 2, jitter": (4, [*mesh(dp_shard=2, ep=2, tp=2), "--model.router_jitter", "0.2"], "bias"),
    "tp 2, sequence": (2, mesh(tp=2), "sequence"),
    "tp 2, whole sequences": (2, [*mesh(tp=2), *WHOLE_SEQUENCES], "bias"),
    "pp 2": (2, [*mesh(pp=2), *TWICE], "sequence"),
    "cp 2": (2, mesh(cp=2), "bias"),
    "two workers": (2, [*mesh(worker=2), "--plugins.local_steps.every", "2"], "bias"),
}


@pytest.mark.parametrize("layout", sweep_but(PADDINGS, "ep 2, tp 2, jitter", "pp 2", "cp 2"))
def test_padding_takes_no_part(layout: str, tmp_path: Path) -> None:
    """Samples of a document of as many tokens each: half padding at a layout, without padding on one rank."""
    ranks, words, balance = PADDINGS[layout]
    (tmp_path / "text").mkdir()
    for number in range(24):
        letters = torch.randint(97, 123, (16,), generator=torch.Generator().manual_seed(number))
        (tmp_path / "text" / f"{number:02}.txt").write_bytes(bytes(letters.tolist()))
    same = (*THREE_STEPS, "--model.balance", balance, "--model.balance_rate", "0.01", "--data.packing", "pad")
    workers = words if "workers" in layout else []
    alone = [*settings(words, "--model.router", "--model.router_jitter"), *workers]
    one = train_job(tmp_path, ranks if workers else 1, *same, *alone, *FULL, config=MOE, name="full")
    padded = train_job(tmp_path, ranks, *same, *words, *PADDED, config=MOE, name="padded")
    for step, row in padded.rows.items():
        assert row.pop("tokens") == 2 * one.rows[step].pop("tokens")
        assert row["expert_load"] == pytest.approx(one.rows[step]["expert_load"])
    assert_same_curve(one, padded)


def test_experts_without_tokens(same_curve) -> None:
    """16 tokens of a step choose among 64 experts: most get none, on all ranks or on some."""
    same = ("--model.n_experts", "64", "--model.top_k", "1", "--data.seq_len", "2")
    same_curve(4, [*same, *mesh(dp_shard=4, ep=4)], same, MOE)


HALF = ("--train.steps", "4")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, mesh(dp_shard=4, ep=4)), (1, [])),
        swept_case(((1, []), (4, mesh(dp_shard=4, ep=4)))),
        swept_case(((4, mesh(dp_shard=2, ep=2, tp=2)), (4, mesh(dp_shard=2, ep=2, pp=2)))),
    ],
    ids=["ep 4, then one rank", "one rank, then ep 4", "ep 2, tp 2, then ep 2, pp 2"],
)
def test_resumed(before: tuple[int, list[str]], after: tuple[int, list[str]], one_rank, tmp_path: Path) -> None:
    """Weights, AdamW's state and the biases of the choice come back at another layout."""
    same = ("--model.balance_rate", "0.01")
    train_job(tmp_path, before[0], *same, *before[1], *SAVING, *HALF, config=MOE)
    assert_same_curve(one_rank(*same, config=MOE), train_job(tmp_path, after[0], *same, *after[1], *SAVING, config=MOE))


def test_ranks_hold_the_same_biases(tmp_path: Path) -> None:
    """Every rank adds up the counts of all, so none drifts: with cp those of other positions."""
    words = ("--model.balance_rate", "0.01", *THREE_STEPS)
    layout = mesh(dp_shard=2, cp=2, ep=2, pp=2)
    one = train_job(tmp_path, 1, *words, config=MOE, name="one", run=run_with_biases).weights
    many = train_job(tmp_path, 8, *words, *layout, config=MOE, name="many", run=run_with_biases).weights
    assert one.keys() == many.keys() and any(tensor.any() for tensor in one.values())
    assert all(torch.equal(one[name], many[name]) for name in one)


REFUSED = {
    "of 4 experts": (mesh(dp_shard=3, ep=3), "mesh.ep = 3 cannot share 4 experts evenly; nearest ep that fits: 2 or 4"),
    "of ranks": (mesh(dp_shard=2, ep=4), "ep = 4: must divide the ranks of the axes that it folds"),
    "without experts": (mesh(dp_shard=2, ep=2), "mesh.ep = 2: the model has no experts; set mesh.ep = 1"),
    "compiled": (
        [*mesh(dp_shard=2, ep=2), *COMPILED],
        r"\[plugins.compile\]: compiles a block as one graph, but \[plugins.expert\] sends as many rows as the router",
    ),
    "sliced sequences": (
        [*mesh(cp=2), "--model.balance", "sequence"],
        'slices sequences, but balance = "sequence" counts the experts of whole sequences; set balance = "bias"',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    words, told = REFUSED[case]
    config, ranks = LLAMA if case == "without experts" else MOE, 3 if case == "of 4 experts" else 2
    with pytest.raises(ConfigError, match=told):
        load_job(config, [*words, "--data.path", ".", "--train.global_batch_size", "6"], ranks)
