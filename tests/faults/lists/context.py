"""Faults of sequences that are split over ranks: who holds which positions, what is merged, what is counted."""

from titan.testing.faults import Fault

ATTENTION = "tests/dist/test_context_attention.py"
WHOLE = f"{ATTENTION}::test_output_and_gradients_are_those_of_one_process"
CURVE = "tests/dist/test_context.py::test_the_curve_of_one_rank"
EVAL = "tests/dist/test_eval.py::test_the_same_at_any_layout"
BLOCKS = "plugins/parallel/context/blocks.py"
OPERATIONS = "plugins/parallel/context/attention.py"

FAULTS = (
    Fault("neighbouring chunks of a sequence on each rank, so that the last rank has most to compute", BLOCKS,
        "return rank, 2 * size - 1 - rank", "return 2 * rank, 2 * rank + 1",
        (f"{ATTENTION}::test_ranks_hold_all_positions_once_and_equal_work",)),
    Fault("positions of a rank in another order than its attention takes them to be", OPERATIONS,
        "view(2 * size, -1)[list(chunks_of(rank, size))]", "view(2 * size, -1)[list(chunks_of(rank, size))[::-1]]",
        (f"{WHOLE}[2]",)),
    Fault("a chunk whose farthest key is one beyond the window attended to as a whole", BLOCKS,
        "or farthest >= window:", "or farthest > window:", (f"{WHOLE}[2]",)),
    Fault("blocks with ALiBi left to a kernel that adds no bias", BLOCKS,
        "if self.documents is not None or self.slopes is not None or farthest",
        "if self.documents is not None or farthest", (f"{WHOLE}[2]",)),
    Fault("the row sums of gradient times output left out of the slopes of scores", BLOCKS,
        "_product(gradient, v.mT).sub_(mean).mul_(softmax)", "_product(gradient, v.mT).mul_(softmax)",
        (f"{ATTENTION}::test_written_blocks_equal_the_fused_kernel[4-all at once]",)),
    Fault("a block added with the weight of its own softmax, not of that over all keys", BLOCKS,
        ".add_(block_out * (block_lse - finite).exp_()[..., None])", ".add_(block_out)", (f"{WHOLE}[2]",)),
    Fault("the log-sum-exp of merged blocks not kept", BLOCKS,
        "    lse.copy_(total)\n", "", (f"{ATTENTION}::test_queries_without_a_key_have_no_output",)),
    Fault("gathered chunks of keys in the order of ranks", OPERATIONS,
        "torch.cat([*first, *second.flip(0)], dim=-2)", "torch.cat([*first, *second], dim=-2)", (f"{WHOLE}[2]",)),
    Fault("gradients of a block that stay with the rank that computed them", OPERATIONS,
        "            dkv += gradients.arrived()\n", "            gradients.arrived()\n", (f"{WHOLE}[2]",)),
    Fault("copies of key-value heads dealt to query heads of another group", OPERATIONS,
        "t.repeat_interleave(copies, dim=1)", "t.repeat(1, copies, 1, 1)", (f"{WHOLE}[4]",)),
    Fault("keys and values sent round again by selective recomputation", OPERATIONS,
        "    torch.ops.titan.ring_attention.default,\n", "",
        (f"{ATTENTION}::test_two_layers_recomputed_and_compiled_give_the_same_numbers",)),
    Fault("labels of other positions than a rank's own", "plugins/parallel/context/__init__.py",
        "labels=batch.labels[:, own]", "labels=batch.labels[:, : len(own)]", (f"{CURVE}[ring, cp 2, packed]",)),
    Fault("positions of a rank numbered from 0", "plugins/parallel/context/__init__.py",
        "positions=batch.positions[:, own]", "positions=batch.positions[:, : len(own)]",
        (f"{CURVE}[ring, cp 2, packed]",)),
    Fault("shards whose gradients are not summed over ranks that hold other positions", "plugins/parallel/fsdp.py",
        'shards = ("dp_shard", *context.mesh.layout.axes_of("sliced"))', 'shards = ("dp_shard",)',
        (f"{CURVE}[ring, cp 2, packed]",)),
    Fault("replicas whose gradients are not summed over ranks that hold other positions", "plugins/parallel/ddp.py",
        'replicas, policy = ("dp_replicate", *context.mesh.layout.axes_of("sliced")),',
        'replicas, policy = ("dp_replicate",),', (f"{CURVE}[ring, ddp 2]",)),
    Fault("tokens of a step counted before the batch is cut", "titan/training/trainer.py",
        """\
    batches = [cut(_seeded(batch, run), run.context) for batch in batches]
    lr = _set_rates(run)
    for technique in techniques:
        technique.before_step(run.step + 1)
    valid = mesh.sum(valid_tokens(batches), "dealt", "sliced")
""",
        """\
    lr = _set_rates(run)
    for technique in techniques:
        technique.before_step(run.step + 1)
    valid = mesh.sum(valid_tokens(batches), "dealt", "sliced")
    batches = [cut(_seeded(batch, run), run.context) for batch in batches]
""",
        (f"{CURVE}[ring, cp 2, packed]",)),
    Fault("a loss on held-out text summed over one rank's positions", "titan/training/validation.py",
        'mesh.sum(sums, "dealt", "sliced", "layers", "own")', 'mesh.sum(sums, "dealt", "layers", "own")',
        (f"{EVAL}[dp_shard 2, cp 2]",)),
    Fault("a last word counted on each rank that holds some of its row", "inference/evaluation.py",
        'counts = mesh.layout.index_of(mesh.rank, "sliced") == 0', "counts = True", (f"{EVAL}[cp 2]",)),
    Fault("a text continued from the last position that each rank holds", "inference/generation.py",
        "_whole(logits, batch.positions == last[:, None])",
        "_whole(logits, batch.positions == batch.positions[:, -1:])",
        ("tests/dist/test_generate.py::test_the_text_is_that_of_one_process[cp 2, ring]",)),
    Fault("positions of another shape than the tokens accepted", "titan/training/phases.py",
        "if shapes[0] != shapes[1] or shapes[0] != shapes[2]:", "if shapes[0] != shapes[1]:",
        ("tests/unit/test_phases.py::test_tokens_labels_and_positions_are_cut_alike",)),
    Fault("labels of another shape than the tokens accepted", "titan/training/phases.py",
        "if shapes[0] != shapes[1] or shapes[0] != shapes[2]:", "if shapes[0] != shapes[2]:",
        ("tests/unit/test_phases.py::test_tokens_labels_and_positions_are_cut_alike",)),
    Fault("an uncut batch accepted on ranks that slice sequences", "titan/training/phases.py",
        "if batch.tokens.shape[1] * ranks != length:", "if batch.tokens.shape[1] * ranks < length:",
        ("tests/unit/test_phases.py::test_ranks_have_a_slice_each",)),
    Fault("a batch cut for no axis accepted", "titan/training/phases.py",
        "if batch.tokens.shape[1] * ranks != length:", "if batch.tokens.shape[1] * ranks > length:",
        ("tests/unit/test_phases.py::test_ranks_have_a_slice_each",)),
    Fault("batches cut in the order of the TOML", "titan/training/phases.py",
        "for technique in sorted(context.techniques, key=lambda technique: ORDER.index(technique.phase)):",
        "for technique in context.techniques:",
        ("tests/unit/test_phases.py::test_techniques_cut_what_those_of_earlier_phases_have_left",)),
    Fault("attention to a rank's own positions accepted as that of the whole sequence", "titan/training/phases.py",
        "module.operation is None and sliced:", "module.operation is not None and sliced:",
        ("tests/unit/test_attention.py::test_slices_of_sequences_need_an_operation_that_reaches_the_others",)),
    Fault("halves of a rank's queries computed apart though they see the same keys",
        "plugins/parallel/context/blocks.py",
        "if first == second:", "if False:",
        ("tests/dist/test_context_attention.py::test_blocks_are_as_few_and_as_large_as_costs_say",)),
    Fault("neighbouring chunks of keys computed one at a time", "plugins/parallel/context/blocks.py",
        "for kind, chunks in groupby(row):", "for kind, chunks in ((kind, [kind]) for kind in row):",
        ("tests/dist/test_context_attention.py::test_blocks_are_as_few_and_as_large_as_costs_say",)),
    Fault("heads that another technique has split refused a second time", "plugins/parallel/context/__init__.py",
        "if kv_heads and not fits(cp):", "if not fits(cp):",
        ("tests/dist/test_context.py::test_heads_that_tp_cannot_split_are_refused_once",)),
    Fault("lengths refused though no rank shares them", "plugins/parallel/context/__init__.py",
        "        if cp == 1:\n            return\n", "        if cp == 0:\n            return\n",
        ("tests/dist/test_context.py::test_one_rank_has_whole_sequences",)),
    Fault("queries of blocks without a mask masked", "plugins/parallel/context/blocks.py",
        'if block.kind == "full":', 'if block.kind == "causal":',
        ("tests/dist/test_context_attention.py::test_every_kind_of_block_may_be_written",)),
)
