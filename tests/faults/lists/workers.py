"""Faults of ranks with weights and state of their own, and of what joins them."""

from titan.testing.faults import Fault

LOCAL, STATE, RESTORE = "plugins/parallel/local_steps.py", "titan/checkpoint/state.py", "titan/checkpoint/restore.py"
STEPS, OWN = "tests/dist/test_local_steps.py", "tests/contract/test_own_weights.py"
GOSSIP, MIXED = "plugins/parallel/gossip.py", "tests/dist/test_gossip.py"
SERVER, TECHNIQUE = (f"plugins/parallel/parameter_server/{name}.py" for name in ("server", "__init__"))
SERVED, PACE = "tests/dist/test_parameter_server.py", "tests/dist/test_own_pace.py"
DATA_PARALLEL = f"{STEPS}::test_an_exchange_after_every_step_is_data_parallelism"

FAULTS = (
    Fault(
        "a worker's loss divided by the tokens of all workers",
        "titan/contracts/base/mesh.py",
        'left_out = () if "own" in facts else self.layout.axes_of("own")',
        "left_out = ()",
        (DATA_PARALLEL,),
    ),
    Fault(
        "rows with the loss of the first worker",
        "titan/training/trainer.py",
        "workers.mean(0)",
        "workers[0]",
        (f"{OWN}::test_weights_of_their_own_at_any_layout_inside",),
    ),
    Fault(
        "skipped updates of the first worker alone",
        "titan/training/nonfinite.py",
        "dropped = sum(worker[0] for worker in workers)",
        "dropped = workers[0][0]",
        (f"{STEPS}::test_a_nan_of_one_worker_skips_its_update_alone",),
    ),
    Fault(
        "the weights of one worker given to all on a resume",
        RESTORE,
        "stored[name] = stored[name].of(place.rank)",
        "stored[name] = stored[name].of(0)",
        (f"{STEPS}::test_gone_on_from_the_middle_of_h_nothing_is_lost",),
    ),
    Fault(
        "another number of workers begins with the first worker's weights",
        RESTORE,
        "for rank in range(saved):",
        "for rank in [0] * saved:",
        (f"{STEPS}::test_another_number_of_workers_begins_with_the_mean",),
    ),
    Fault(
        "state of ranks' own averaged where its sum counts",
        RESTORE,
        'saved if joined[name][1].join == "mean" else joined[name][1].ranks',
        "saved",
        (f"{OWN}::test_state_of_a_ranks_own_keeps_its_sum",),
    ),
    Fault(
        "optimizer state of the workers saved once",
        STATE,
        'name.startswith((MODEL, OPTIMIZER, f"{REST}{TECHNIQUES}."))',
        'name.startswith((MODEL, f"{REST}{TECHNIQUES}."))',
        (f"{STEPS}::test_gone_on_from_the_middle_of_h_nothing_is_lost",),
    ),
    Fault(
        "an outer step without Nesterov's look ahead",
        LOCAL,
        "(change + self.config.outer_momentum * momentum)",
        "momentum",
        (f"{STEPS}::test_the_outer_step_is_nesterovs",),
    ),
    Fault(
        "what the workers agreed on forgotten on a resume",
        LOCAL,
        "for name in kept.keys() & saved.keys():",
        "for name in ():",
        (f"{STEPS}::test_gone_on_from_the_middle_of_h_nothing_is_lost",),
    ),
    Fault(
        "blocks of a quantised exchange across tensors",
        LOCAL,
        "sizes = [-(-one.numel() // BLOCK) * BLOCK for one in own]",
        "sizes = [one.numel() for one in own]",
        (f"{STEPS}::test_replicas_agree_whatever_slices_the_rest",),
    ),
    Fault(
        "fragments that are all exchanged at once",
        LOCAL,
        "turn = [i for i, due in enumerate(self._due) if step >= due or step == last]",
        "turn = [i for i, _ in enumerate(self._due) if step >= self._due[0] or step == last]",
        (f"{STEPS}::test_fragments_take_turns",),
    ),
    Fault(
        "an optimizer around the optimizer that is not used",
        "titan/training/build.py",
        'optimizer = answer(technique, "optimizer", torch.optim.Optimizer, optimizer, named)',
        'answer(technique, "optimizer", torch.optim.Optimizer, optimizer, named)',
        (f"{OWN}::test_an_optimizer_around_the_optimizer",),
    ),
    Fault(
        "a tied table exchanged on one of a rank's two stages",
        LOCAL,
        "            for weight in self._weights[name]:",
        "            for weight in self._weights[name][:1]:",
        (f"{STEPS}::test_a_tied_table_on_both_stages_of_a_rank_stays_one",),
    ),
    Fault(
        "a first update that only some workers make",
        "titan/training/nonfinite.py",
        "self._first = fresh and bool(mesh.layout.worker_axis)",
        "self._first = False",
        (f"{STEPS}::test_a_first_update_is_made_by_all_workers_or_by_none",),
    ),
    Fault(
        "numbers of the optimizer's state saved of one worker",
        STATE,
        "values = {stacks.numbered(name): value for name, value in values.items()}",
        "values = {stacks.numbered(name, 1): value for name, value in values.items()}",
        (f"{OWN}::test_workers_have_numbers_of_their_own_in_the_optimizers_state",),
    ),
    Fault(
        "gossip whose tracked gradients stay with their worker",
        GOSSIP,
        "*self._buffers, *self._tracked]",
        "*self._buffers]",
        (f"{MIXED}::test_the_steps_are_those_of_the_papers[one_peer-]",),
    ),
    Fault(
        "gossip that tracks the gradient of a skipped update",
        GOSSIP,
        "torch.where(finite, self.config.momentum * before + gradient, before)",
        "self.config.momentum * before + gradient",
        (f"{MIXED}::test_a_nan_of_one_worker_stays_its_own",),
    ),
    Fault(
        "gossip that ends with the weights of as many models as workers",
        GOSSIP,
        "last = step == self._context.job.train.steps",
        "last = False",
        (f"{MIXED}::test_the_steps_are_those_of_the_papers[ring-]",),
    ),
    Fault(
        "gossip that adds up a mean in another order on each worker",
        GOSSIP,
        "total, *others = parts\n",
        "total, *others = parts[at:] + parts[:at]\n",
        (f"{MIXED}::test_the_steps_are_those_of_the_papers[ring-]",),
    ),
    Fault(
        "gossip with one copy of a tied table, where a rank of a V-shaped schedule has two",
        GOSSIP,
        "_buckets([*self._parameters, *self._buffers",
        "_buckets([*dict(zip(self._names, self._parameters)).values(), *self._buffers",
        (f"{MIXED}::test_an_exact_mean_after_every_step_is_data_parallelism",),
    ),
    Fault(
        "a pull answered a step before the bound allows it",
        SERVER,
        "self.waiting[worker] = step, step - bound",
        "self.waiting[worker] = step, step - bound - 1",
        (f"{SERVED}::test_a_pull_waits_at_the_bound_and_not_before",),
    ),
    Fault(
        "a late push at the full rate",
        SERVER,
        "/ max(self._workers, delay)",
        "/ self._workers",
        (f"{SERVED}::test_a_late_push_counts_the_less",),
    ),
    Fault(
        "gradients of the workers summed up, not averaged",
        SERVER,
        "self._gradient.div_(len(self._added))",
        "self._gradient.div_(1)",
        (f"{SERVED}::test_staleness_0_is_data_parallelism",),
    ),
    Fault(
        "the servers' optimizer state forgotten on a resume",
        TECHNIQUE,
        'in state.get("optimizer", {}).items():',
        "in ():",
        (f"{SERVED}::test_state_comes_back_at_any_number_of_workers_and_servers",),
    ),
    Fault(
        "workers that stop after steps of their own",
        "titan/ranks/preemption.py",
        'if why and self._step >= last else ""',
        'if why else ""',
        (f"{PACE}::test_a_signal_stops_all_after_one_step",),
    ),
)
