"""Faults of the parallelisms: which gradients are summed over which ranks, and who holds what."""

from tests.faults.fault import Fault

PARITY = "tests/dist/test_parity.py::test_llama"
TENSOR = "tests/dist/test_tensor.py::test_loss_and_gradients_are_those_of_one_process"

FAULTS = (
    Fault(
        "a norm over all heads that sees the mean of a rank's own",
        "titan/contracts/base/sharding.py",
        "squares = _total(wide.square().sum(-1, keepdim=True), slices)",
        "squares = slices.size * wide.square().sum(-1, keepdim=True)",
        ("tests/dist/test_tensor.py::test_loss_and_gradients_are_those_of_one_process[2-olmo2, norms over all heads]",),
    ),
    Fault(
        "a norm over all heads whose gradient leaves out the other ranks",
        "titan/contracts/base/sharding.py",
        "products = _total((through * normed).sum(-1, keepdim=True), ctx.slices)",
        "products = ctx.slices.size * (through * normed).sum(-1, keepdim=True)",
        ("tests/dist/test_tensor.py::test_loss_and_gradients_are_those_of_one_process[2-olmo2, norms over all heads]",),
    ),
    Fault(
        "a weight over all heads held whole by every rank in the plan",
        "titan/planner/step/parameters.py",
        'if costs.style(op.module) == "wide_norm" else 1',
        "if False else 1",
        (
            "tests/unit/test_planned_memory.py::"
            "test_memory_is_that_of_the_dry_run[norms over all heads, tensor parallel]",
        ),
    ),
    Fault(
        "a recomputed layer whose last product is left out though a norm follows it",
        "titan/contracts/base/cost/__init__.py",
        "return any(op.saved for op in self.layer[last + 1 :])",
        "return False",
        (
            "tests/unit/test_planned_memory.py::"
            "test_collectives_move_the_bytes_of_the_dry_run[norms over all heads, grouped, full]",
        ),
    ),
    Fault(
        "gradients averaged over data-parallel ranks",
        "titan/contracts/base/parts.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        (f"{PARITY}[dp_shard 2]",),
    ),
    Fault(
        "replicas of shards that do not sum their gradients",
        "plugins/parallel/fsdp.py",
        "root.set_requires_all_reduce(last)",
        "root.set_requires_all_reduce(False)",
        (f"{PARITY}[accumulation, hsdp 2x2, zero 3]",),
    ),
    Fault(
        "replicas of tensor-parallel shards that do not sum their gradients",
        "plugins/parallel/fsdp.py",
        'replicated = context.job.layout.degree("dp_replicate") > 1',
        'replicated = context.job.layout.degree("dp_replicate") > 1 and context.job.layout.degree("tp") == 1',
        (f"{PARITY}[hsdp 2x2, tp 2]",),
    ),
    Fault(
        "DDP that sums the gradients of no micro batch",
        "plugins/parallel/ddp.py",
        "root.set_requires_gradient_sync(last)",
        "root.set_requires_gradient_sync(False)",
        (f"{PARITY}[ddp 4]",),
    ),
    Fault(
        "parameters gathered once more per step at ZeRO stage 1",
        "plugins/parallel/fsdp.py",
        "set_is_last_backward(last or self._stage == 1)",
        "set_is_last_backward(last)",
        ("tests/unit/test_dryrun.py::test_zero_1_gathers_the_head_once_however_many_micro_batches",),
    ),
    Fault(
        "gradients scaled by tp",
        "titan/contracts/base/sharding.py",
        "return _sum(gradient, ctx.slices), None",
        "return _sum(gradient, ctx.slices) * ctx.slices.size, None",
        (f"{PARITY}[tp 2]",),
    ),
    Fault(
        "gradients of replicated norms not summed over tp",
        "plugins/parallel/tensor.py",
        "torch._foreach_copy_(list(gradients.values()), sums)",
        "pass",
        (f"{TENSOR}[2-llama, grouped queries]",),
    ),
    Fault(
        "gradients of norms of heads summed over tp only where sequences are split",
        "plugins/parallel/tensor.py",
        "slices.positions or facts.partial or style",
        "slices.positions or style",
        ("tests/dist/test_replicas.py::test_the_curve_is_one_ranks_and_replicas_are_equal[tp 2, whole sequences]",),
    ),
    Fault(
        "a bias added by every rank before the sum over tp",
        "titan/contracts/base/sharding.py",
        "return local * 0 if zero else local",
        "return local",
        (f"{TENSOR}[2-gpt, tied, biases]",),
    ),
    Fault(
        "a split linear accepted where nothing gathers its input",
        "plugins/parallel/tensor.py",
        "and not inside:",
        "and False:",
        ("tests/dist/test_tensor.py::test_a_linear_whose_input_nothing_gathers_is_refused",),
    ),
    Fault(
        "partial sums of gradients shown to techniques without axes",
        "titan/training/trainer.py",
        "key=lambda technique: not technique.axes",
        "key=lambda technique: bool(technique.axes)",
        ("tests/dist/test_replicas.py::test_a_technique_without_axes_sees_whole_gradients",),
    ),
    Fault(
        "sums over tp sent again by selective recomputation",
        "plugins/parallel/tensor.py",
        "operations.all_reduce.default, operations.reduce_scatter_tensor.default,",
        "operations.reduce_scatter_tensor.default,",
        (
            "tests/unit/test_planned_memory.py::test_collectives_move_the_bytes_of_the_dry_run"
            "[tensor parallel, whole sequences, selective]",
        ),
    ),
    Fault(
        "gradients accepted that differ between ranks which should agree",
        "plugins/parallel/tensor.py",
        "        if not self._checked:\n            self._check_equal()\n",
        "",
        ("tests/dist/test_tensor.py::test_a_norm_whose_gradient_differs_between_ranks_is_refused",),
    ),
    Fault(
        "words of other ranks looked up in a rank's slice",
        "plugins/parallel/tensor.py",
        "torch.where(here[..., None], rows, 0.0)",
        "rows",
        (f"{TENSOR}[2-llama, grouped queries]",),
    ),
    Fault(
        "a tied head untied by tensor parallelism",
        "plugins/parallel/tensor.py",
        "part.retie(context.spec)",
        "pass",
        ("tests/dist/test_tensor.py::test_tied_weights_stay_one_tensor_and_slices_may_be_uneven",),
    ),
    Fault(
        "a softmax by each rank's own largest logit",
        "plugins/losses/cross_entropy.py",
        "dist.all_reduce(highest, dist.ReduceOp.MAX, group)",
        "pass",
        ("tests/dist/test_loss_vocab.py::test_split_is_whole[0.0-uneven]",),
    ),
    Fault(
        "a tied head not summed over pipeline stages",
        "plugins/parallel/pipeline/__init__.py",
        "self._tied.add()",
        "pass",
        ("tests/dist/test_pipeline.py::test_tied_weights_get_the_gradients_of_both_ends[2]",),
    ),
    Fault(
        "a pipeline that divides gradients by its micro batches",
        "plugins/parallel/pipeline/engine.py",
        "scale_grads=False",
        "scale_grads=True",
        (f"{PARITY}[pp 2]",),
    ),
    Fault(
        "the first positions' random numbers on all tensor-parallel ranks",
        "plugins/parallel/tensor.py",
        "return x, seeds, positions.chunk(slices.size, dim=1)[slices.rank]",
        "return x, seeds, positions.chunk(slices.size, dim=1)[0]",
        ("tests/dist/test_dropout.py::test_the_curve_of_one_process[tp 2]",),
    ),
    Fault(
        "stages after the first not told where documents end",
        "plugins/parallel/pipeline/engine.py",
        'more["documents"] = torch.cat(documents)',
        'more |= {"documents": torch.cat(documents)} if 0 in self.parts else {}',
        ("tests/dist/test_pipeline.py::test_every_stage_is_told_which_document_a_token_is_of",),
    ),
    Fault(
        "weight gradients of a split backward pass summed in bf16",
        "plugins/parallel/pipeline/engine.py",
        "if isinstance(self.submod, FSDPModule):",
        "if False:",
        ("tests/dist/test_pipeline.py::test_bf16_gradients_are_summed_in_fp32_by_every_schedule[dp_shard]",),
    ),
    Fault(
        "ranks of one slice group that read different samples",
        "titan/training/build.py",
        'index=job.layout.index_of(rank.number, "dealt")',
        "index=rank.number % job.batch_ranks",
        (f"{PARITY}[dp_shard 2, tp 2]",),
    ),
    Fault(
        "a rank's index among others in the wrong order",
        "titan/contracts/base/mesh.py",
        "index = index * self.degrees[name] + at[name]",
        "index = index + at[name] * self.degrees[name]",
        ("tests/unit/test_mesh.py::test_roles_number_the_ranks_that_differ_in_them",),
    ),
    Fault(
        "a process group in a module ending a pipeline in a stack trace",
        "plugins/parallel/pipeline/stages.py",
        "except TypeError as error:",
        "except ValueError as error:",
        ("tests/unit/test_pipeline.py::test_a_module_that_holds_a_process_group_is_refused",),
    ),
    Fault(
        "replicas of tp that rounding may set apart",
        "plugins/parallel/tensor.py",
        "_gradients(self._partial) | equal",
        "_gradients(self._partial)",
        ("tests/dist/test_tensor.py::test_replicas_that_rounding_sets_apart_are_joined",),
    ),
)
