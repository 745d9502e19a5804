"""Faults of sequences that are split over ranks: who holds which positions, what is merged, what is counted."""

from titan.testing.faults import Fault

ATTENTION = "tests/dist/test_context_attention.py"
WHOLE = f"{ATTENTION}::test_output_and_gradients_are_those_of_one_process"
CURVE = "tests/dist/test_context.py::test_the_curve_of_one_rank"
EVAL = "tests/dist/test_eval.py::test_the_same_at_any_layout"
BLOCKS = "plugins/parallel/context/blocks.py"
OPERATIONS = "plugins/parallel/context/attention.py"

FAULTS = (
    Fault("neighbouring chunks of a sequence on each rank, so that the last rank has most to compute",
        f"{BLOCKS}::chunks_of",
        "rank, 2 * size - 1 - rank", "2 * rank, 2 * rank + 1",
        (f"{ATTENTION}::test_ranks_hold_all_positions_once_and_equal_work",)),
    Fault("positions of a rank in another order than its attention takes them to be", f"{OPERATIONS}::positions_of",
        "list(chunks_of(rank, size))", "list(chunks_of(rank, size))[::-1]", (f"{WHOLE}[2]",)),
    Fault("a chunk whose farthest key is one beyond the window attended to as a whole", f"{BLOCKS}::Sight.kind",
        "self.documents is not None or self.slopes is not None or farthest >= window",
        "self.documents is not None or self.slopes is not None or farthest > window", (f"{WHOLE}[2]",)),
    Fault("blocks with ALiBi left to a kernel that adds no bias", f"{BLOCKS}::Sight.kind",
        "self.documents is not None or self.slopes is not None or farthest >= window",
        "self.documents is not None or farthest >= window", (f"{WHOLE}[2]",)),
    Fault("the row sums of gradient times output left out of the slopes of scores", f"{BLOCKS}::backward_written",
        "_product(gradient, v.mT).sub_(mean)", "_product(gradient, v.mT)",
        (f"{ATTENTION}::test_written_blocks_equal_the_fused_kernel[4-all at once]",)),
    Fault("a block added with the weight of its own softmax, not of that over all keys", f"{BLOCKS}::merge",
        "block_out * (block_lse - finite).exp_()[..., None]", "block_out", (f"{WHOLE}[2]",)),
    Fault("the log-sum-exp of merged blocks not kept", f"{BLOCKS}::merge",
        "lse.copy_(total)", "", (f"{ATTENTION}::test_queries_without_a_key_have_no_output",)),
    Fault("gathered chunks of keys in the order of ranks", f"{OPERATIONS}::_all_chunks",
        "second.flip(0)", "second", (f"{WHOLE}[2]",)),
    Fault("gradients of a block that stay with the rank that computed them", f"{OPERATIONS}::_ring_backward",
        "dkv += gradients.arrived()", "gradients.arrived()", (f"{WHOLE}[2]",)),
    Fault("copies of key-value heads dealt to query heads of another group", f"{OPERATIONS}::ulysses",
        "t.repeat_interleave(copies, dim=1)", "t.repeat(1, copies, 1, 1)", (f"{WHOLE}[4]",)),
    Fault("keys and values sent round again by selective recomputation", f"{OPERATIONS}",
        "(torch.ops.titan.ring_attention.default, torch.ops.titan.gather_attention.default, "
        "_collectives.all_to_all_single.default)",
        "(torch.ops.titan.gather_attention.default, _collectives.all_to_all_single.default)",
        (f"{ATTENTION}::test_two_layers_recomputed_and_compiled_give_the_same_numbers",)),
    Fault("labels of other positions than a rank's own", "plugins/parallel/context/__init__.py::ContextParallel.batch",
        "replace(batch, tokens=batch.tokens[:, own], labels=batch.labels[:, own], positions=batch.positions[:, "
        "own])",
        "replace(batch, tokens=batch.tokens[:, own], labels=batch.labels[:, : len(own)], "
        "positions=batch.positions[:, own])", (f"{CURVE}[ring, cp 2, packed]",)),
    Fault("positions of a rank numbered from 0", "plugins/parallel/context/__init__.py::ContextParallel.batch",
        "replace(batch, tokens=batch.tokens[:, own], labels=batch.labels[:, own], positions=batch.positions[:, "
        "own])",
        "replace(batch, tokens=batch.tokens[:, own], labels=batch.labels[:, own], positions=batch.positions[:, "
        ": len(own)])", (f"{CURVE}[ring, cp 2, packed]",)),
    Fault("shards whose gradients are not summed over ranks that hold other positions",
        "plugins/parallel/fsdp.py::FullyShardedDataParallel.apply",
        '("dp_shard", *context.mesh.layout.axes_of("sliced"))', '("dp_shard",)', (f"{CURVE}[ring, cp 2, packed]",)),
    Fault("replicas whose gradients are not summed over ranks that hold other positions",
        "plugins/parallel/ddp.py::DistributedDataParallel.apply",
        '("dp_replicate", *context.mesh.layout.axes_of("sliced"))', '("dp_replicate",)', (f"{CURVE}[ring, ddp 2]",)),
    Fault("tokens of a step counted before the batch is cut", "titan/training/trainer.py::step",
        "batches = [cut(_seeded(batch, run), run.context) for batch in batches]\nlr = _set_rates(run)\nfor "
        "technique in techniques:\n    technique.before_step(run.step + 1)\nvalid = "
        'mesh.sum(valid_tokens(batches), "dealt", "sliced")',
        "lr = _set_rates(run)\nfor technique in techniques:\n    technique.before_step(run.step + 1)\nvalid = "
        'mesh.sum(valid_tokens(batches), "dealt", "sliced")\nbatches = [cut(_seeded(batch, run), run.context) '
        "for batch in batches]", (f"{CURVE}[ring, cp 2, packed]",)),
    Fault("a loss on held-out text summed over one rank's positions", "titan/training/validation.py::totals",
        'context.mesh.sum(sums, "dealt", "sliced", "layers", "own")',
        'context.mesh.sum(sums, "dealt", "layers", "own")', (f"{EVAL}[dp_shard 2, cp 2]",)),
    Fault("a last word counted on each rank that holds some of its row", "inference/evaluation.py::_known_words",
        'mesh.layout.index_of(mesh.rank, "sliced") == 0', "True", (f"{EVAL}[cp 2]",)),
    Fault("a text continued from the last position that each rank holds", "inference/generation.py::_Model.next",
        "batch.positions == last[:, None]", "batch.positions == batch.positions[:, -1:]",
        ("tests/dist/test_generate.py::test_the_text_is_that_of_one_process[cp 2, ring]",)),
    Fault("positions of another shape than the tokens accepted", "titan/training/phases.py::cut",
        "shapes[0] != shapes[1] or shapes[0] != shapes[2]", "shapes[0] != shapes[1]",
        ("tests/unit/test_phases.py::test_tokens_labels_and_positions_are_cut_alike",)),
    Fault("labels of another shape than the tokens accepted", "titan/training/phases.py::cut",
        "shapes[0] != shapes[1] or shapes[0] != shapes[2]", "shapes[0] != shapes[2]",
        ("tests/unit/test_phases.py::test_tokens_labels_and_positions_are_cut_alike",)),
    Fault("an uncut batch accepted on ranks that slice sequences", "titan/training/phases.py::cut",
        "batch.tokens.shape[1] * ranks != length", "batch.tokens.shape[1] * ranks < length",
        ("tests/unit/test_phases.py::test_ranks_have_a_slice_each",)),
    Fault("a batch cut for no axis accepted", "titan/training/phases.py::cut",
        "batch.tokens.shape[1] * ranks != length", "batch.tokens.shape[1] * ranks > length",
        ("tests/unit/test_phases.py::test_ranks_have_a_slice_each",)),
    Fault("batches cut in the order of the TOML", "titan/training/phases.py::cut",
        "sorted(context.techniques, key=lambda technique: ORDER.index(technique.phase))", "context.techniques",
        ("tests/unit/test_phases.py::test_techniques_cut_what_those_of_earlier_phases_have_left",)),
    Fault("attention to a rank's own positions accepted as that of the whole sequence",
        "titan/training/phases.py::check_names",
        "module.operation is None", "module.operation is not None",
        ("tests/unit/test_attention.py::test_slices_of_sequences_need_an_operation_that_reaches_the_others",)),
    Fault("halves of a rank's queries computed apart though they see the same keys",
        "plugins/parallel/context/blocks.py::blocks_of",
        "first == second", "False",
        ("tests/dist/test_context_attention.py::test_blocks_are_as_few_and_as_large_as_costs_say",)),
    Fault("neighbouring chunks of keys computed one at a time", "plugins/parallel/context/blocks.py::_runs",
        "groupby(row)", "((kind, [kind]) for kind in row)",
        ("tests/dist/test_context_attention.py::test_blocks_are_as_few_and_as_large_as_costs_say",)),
    Fault("heads that another technique has split refused a second time",
        "plugins/parallel/context/__init__.py::_undealt",
        "kv_heads and not fits(cp)", "not fits(cp)",
        ("tests/dist/test_context.py::test_heads_that_tp_cannot_split_are_refused_once",)),
    Fault("lengths refused though no rank shares them", "plugins/parallel/context/__init__.py::ContextParallel.check",
        "if cp == 1:\n    return", "if cp == 0:\n    return",
        ("tests/dist/test_context.py::test_one_rank_has_whole_sequences",)),
    Fault("queries of blocks without a mask masked", "plugins/parallel/context/blocks.py::Queries._mask",
        'block.kind == "full"', 'block.kind == "causal"',
        ("tests/dist/test_context_attention.py::test_every_kind_of_block_may_be_written",)),
)
