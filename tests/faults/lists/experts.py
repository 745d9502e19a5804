"""Faults of mixtures of experts, of the axis that shares them, and of losses beside the objective."""

from titan.testing.faults import Fault

LAYER, TECHNIQUE = "titan/layers/experts.py", "plugins/parallel/expert.py"
MODEL, ROUTER = "plugins/models/moe/__init__.py", "plugins/models/moe/mixture.py"
UNIT, DIST = "tests/unit/test_experts.py", "tests/dist/test_experts.py"
SKIPPED = "tests/contract/test_skipped_steps.py"
PADDED = f"{UNIT}::test_padding_takes_no_part_in_counts_entropies_and_gradients[softmax-bias]"

FAULTS = (
    Fault(
        "results of experts left in the order of the experts",
        LAYER,
        "results[back].view",
        "results.view",
        (f"{UNIT}::test_a_token_gets_the_weighted_sum_of_its_experts",),
    ),
    Fault(
        "a stack's gradient of weights with its rows in another order",
        LAYER,
        "counts).transpose(1, 2) if of_weight",
        "counts).flip(1).transpose(1, 2) if of_weight",
        (f"{UNIT}::test_gradients_of_a_stack[counts0]",),
    ),
    Fault(
        "a side loss that counts whole on every rank of tp",
        "plugins/parallel/tensor/__init__.py",
        "inner.share /= slices.size",
        "inner.share /= 1",
        (f"{DIST}::test_one_curve[tp 2-sequence]",),
    ),
    Fault(
        "a side loss that is not divided by the sequences of a step",
        "titan/training/build.py",
        "module.share /= job.train.global_batch_size",
        "module.share /= job.micro_batch",
        (f"{DIST}::test_one_curve[dp_shard 2-sequence]",),
    ),
    Fault(
        "a router's gradients not summed over tp",
        "titan/contracts/base/spec.py",
        'partial=style in ("qk_norm", "router")',
        'partial=style == "qk_norm"',
        (f"{DIST}::test_one_curve[tp 2, whole sequences-bias]",),
    ),
    Fault(
        "counts of experts not added up over ranks of other positions",
        "titan/training/trainer.py",
        'lambda tensor: mesh.sum(tensor, "dealt", "sliced")',
        'lambda tensor: mesh.sum(tensor, "dealt")',
        (f"{DIST}::test_ranks_hold_the_same_biases",),
    ),
    Fault(
        "a bias that favors busy experts",
        MODEL,
        "own.float().mean() - own",
        "own - own.float().mean()",
        (f"{UNIT}::test_the_bias_moves_towards_even_counts_and_changes_the_choice_alone",),
    ),
    Fault(
        "a bias in the weights of experts too",
        ROUTER,
        "weights = scores.gather(-1, chosen)",
        "weights = (scores if self.bias is None else scores + self.bias).gather(-1, chosen)",
        (f"{UNIT}::test_the_bias_moves_towards_even_counts_and_changes_the_choice_alone",),
    ),
    Fault(
        "rows of experts computed in the order of the ranks that sent them",
        TECHNIQUE,
        ".argsort(stable=True)",
        ".argsort(stable=True).sort().values",
        (f"{DIST}::test_folded[ep 2 of dp_shard 2]",),
    ),
    Fault(
        "gradients of rows that stay where the experts are",
        TECHNIQUE,
        "ctx.settings = group, sent, received",
        "ctx.settings = group, received, sent",
        (f"{DIST}::test_folded[ep 2 of dp_shard 2]",),
    ),
    Fault(
        "experts sharded over all ranks of data parallelism",
        "plugins/parallel/fsdp.py",
        "meshes = {axis: mesh.flat(*dimensions, without=axis) for _, axis in folded}",
        "meshes = {axis: mesh.flat(*dimensions) for _, axis in folded}",
        (f"{DIST}::test_folded[ep 2 of dp_shard 4]",),
    ),
    Fault(
        "a mixture whose input ranks of tp do not gather",
        "plugins/parallel/tensor/__init__.py",
        'if style in ("gather", "mixture", "head"):',
        'if style in ("gather", "head"):',
        (f"{DIST}::test_one_curve[tp 2-bias]",),
    ),
    Fault(
        "jitter that only shrinks what routers see",
        "titan/layers/philox.py",
        "(2 * self.uniform(x, seeds, positions) - 1)",
        "(self.uniform(x, seeds, positions) - 1)",
        ("tests/unit/test_philox.py::test_jitter_is_uniform_around_one_and_absent_in_evaluation[dtype0]",),
    ),
    Fault(
        "padding counted among the tokens of experts",
        ROUTER,
        "rows_per_expert(chosen, len(self.counts), real)",
        "rows_per_expert(chosen, len(self.counts))",
        (PADDED,),
    ),
    Fault(
        "entropies of padding too",
        ROUTER,
        "nats if real is None else torch.where(real[:, None], nats, 0.0)",
        "nats",
        (PADDED,),
    ),
    Fault(
        "rows of padding computed, but not among those that are routed",
        ROUTER,
        "self.routed.add_(chosen.numel())",
        "self.routed.add_(chosen.numel() if real is None else real.sum() * self.top_k)",
        (PADDED,),
    ),
    Fault(
        "scores of padding in the loss per sequence",
        ROUTER,
        "torch.where(real[..., None], shares, 0.0).sum(1) / tokens",
        "shares.mean(1)",
        (f"{UNIT}::test_imbalance_of_padded_sequences_is_that_of_their_tokens",),
    ),
    Fault(
        "padding found by the place on a rank, not in the sequence",
        "titan/layers/decoder.py",
        "positions < lengths[:, None]",
        "positions.argsort(1) < lengths[:, None]",
        (f"{DIST}::test_padding_takes_no_part[cp 2]",),
    ),
    Fault(
        "a bias moved by a step that is skipped",
        MODEL,
        "torch.where(updated, move, 0.0)",
        "move",
        (f"{SKIPPED}::test_a_skipped_step_changes_nothing[moe]", f"{SKIPPED}::test_each_worker_skips_its_own_steps"),
    ),
    Fault(
        "entropies of a step that is skipped in the row",
        ROUTER,
        "torch.where(updated, self.entropy, 0.0)",
        "self.entropy",
        (f"{UNIT}::test_a_skipped_step_moves_no_bias_and_leaves_no_trace_in_rows",),
    ),
)
