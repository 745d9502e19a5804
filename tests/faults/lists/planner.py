"""Faults of the planner: times, memory, communication, bounds of the search."""

from titan.testing.faults import Fault

COSTS = "tests/unit/test_costs.py"
PREDICT = "tests/unit/test_predict.py"
SEARCH = "tests/unit/test_search.py::test_bounds_are_below_the_step_and_near_it"

WORKERS = "tests/unit/test_planned_workers.py"

FAULTS = (
    Fault(
        "an exchange that is stated before the shards",
        "titan/planner/step/layout.py",
        "PHASES.index(technique.phase)",
        "0",
        (f"{WORKERS}::test_an_exchange_follows_the_shards_whatever_the_order_of_tables",),
    ),
    Fault(
        "memory without the buffers of an exchange",
        "titan/planner/step/memory.py",
        "if activations + gradients + buffers < after:",
        "if False:",
        ("tests/unit/test_planned_memory.py::test_memory_is_that_of_the_dry_run[workers, int8]",),
    ),
    Fault(
        "a study of bandwidth without the ratio of steps",
        "titan/planner/report/fabric.py",
        "prediction.step_time_s * way.steps",
        "prediction.step_time_s",
        ("tests/unit/test_fabric.py::test_each_point_is_the_step_at_its_bandwidth_times_the_ratio_of_steps",),
    ),
    Fault(
        "a site whose ranks each have its whole bandwidth",
        "titan/planner/machine/cluster.py",
        "self.bandwidth_gbit_s / 8 / ranks",
        "self.bandwidth_gbit_s / 8",
        ("tests/unit/test_cluster.py::test_sites_are_one_more_level_whose_bandwidth_the_ranks_of_a_site_share",),
    ),
    Fault(
        "a search through numbers of workers",
        "titan/planner/search/space.py",
        'if axis.weights == "own"]\n    degrees = ',
        "if False]\n    degrees = ",
        (f"{WORKERS}::test_a_search_keeps_the_workers_of_the_job",),
    ),
    Fault(
        "a bound of the search above the step",
        "titan/planner/search/best_first.py",
        "least = max(least * self.planner.speed(layout), busy)",
        "least = 1.2 * max(least * self.planner.speed(layout), busy)",
        (SEARCH,),
    ),
    Fault(
        "a bound that starts each stage at the end of all before it",
        "titan/planner/step/predict.py",
        "begins, returns = begins + work.forward, returns + work.inputs",
        "begins, returns = begins + 2 * work.forward, returns + 2 * work.inputs",
        (SEARCH,),
    ),
    Fault(
        "1F1B that starts one micro batch too many",
        "plugins/parallel/pipeline/orders.py",
        "ahead = min(micro_batches, ranks - rank)",
        "ahead = min(micro_batches, ranks - rank + 1)",
        ("tests/unit/test_orders.py::test_ranks_keep_as_many_micro_batches_as_the_plugin_says",),
    ),
    Fault(
        "1F1B that keeps all micro batches in the planner's memory",
        "titan/planner/step/memory.py",
        "            now -= stage.kept\n",
        "            pass\n",
        ("tests/unit/test_planned_memory.py::test_memory_is_that_of_the_dry_run[1F1B]",),
    ),
    Fault(
        "memory without optimizer state",
        "titan/planner/step/memory.py",
        "self.parameters + self.gradients + self.optimizer +",
        "self.parameters + self.gradients +",
        (f"{PREDICT}::test_the_command_prints_what_scripts_rely_on",),
    ),
    Fault(
        "optimizer state that is not sharded",
        "plugins/optimizers/adamw.py",
        "bytes_per_param=8, axes=costs.updated_over",
        "bytes_per_param=8, axes=()",
        (f"{COSTS}::test_state_in_bytes_a_parameter",),
    ),
    Fault(
        "communication of the wrong axis",
        "plugins/parallel/fsdp.py",
        'axes=("dp_replicate",), collective="all_reduce"',
        'axes=("dp_shard",), collective="all_reduce"',
        (f"{COSTS}::test_hybrid_sharding_reduces_between_replicas_what_a_shard_holds",),
    ),
    Fault(
        "an all-reduce at the price of a reduce-scatter",
        "titan/contracts/base/collectives.py",
        '"all_reduce": 2.0',
        '"all_reduce": 1.0',
        (
            f"{PREDICT}::test_collectives_take_their_bytes_over_the_slowest_link",
            "tests/dist/test_bytes_sent.py::test_whoever_issues_a_collective",
        ),
    ),
    Fault(
        "a collective over the fastest link of its group",
        "titan/planner/machine/network.py",
        "slowest = min(slowest, below",
        "slowest = min(math.inf, 8 * below",
        ("tests/unit/test_network.py::test_the_slowest_level_counts",),
    ),
    Fault(
        "ZeRO stage 3 that gathers once per micro batch",
        "plugins/parallel/fsdp.py",
        "if stage == 3:",
        "if stage == 4:",
        (f"{COSTS}::test_zero_stages_gather_and_reduce_as_often_as_they_say",),
    ),
    Fault(
        "recomputation of every block where every n-th was asked for",
        "titan/planner/step/memory.py",
        "return len(layers) if recompute.every == 1 else",
        "return len(layers) if every >= 1 else",
        (f"{PREDICT}::test_full_recompute_is_another_forward_but_for_the_last_product",),
    ),
    Fault(
        "attention's products counted as causal",
        "titan/contracts/base/cost/operations.py",
        "return 4.0 * self.keys(seq_len)",
        "return 2.0 * self.keys(seq_len)",
        (f"{COSTS}::test_operations_have_the_parameters_and_flops_of_the_plan",),
    ),
    Fault(
        "a pipeline without a bubble",
        "titan/planner/step/predict.py",
        'spent["bubble"] = max(0.0, step - work)',
        'spent["bubble"] = 0.0',
        (f"{PREDICT}::test_the_bubble_of_equal_stages_is_the_textbooks",),
    ),
    Fault(
        "a job that is out of memory said to fit",
        "titan/planner/step/predict.py",
        "fits=all(m.total <= cluster",
        "fits=all(0 * m.total <= cluster",
        (f"{PREDICT}::test_the_table_says_that_a_job_does_not_fit",),
    ),
    Fault(
        "a micro batch that nobody set kept through a study of longer sequences",
        "titan/planner/report/studies.py",
        'if job.table["train"]["micro_batch_size"]:',
        "if job.micro_batch:",
        ("tests/unit/test_studies.py::test_longer_sequences_leave_a_micro_batch_that_is_not_set_to_each_layout",),
    ),
    Fault(
        "a study of an axis that nobody owns ending in a stack trace",
        "titan/planner/report/studies.py",
        "        if not axes:\n",
        "        if axes is None:\n",
        ("tests/unit/test_studies.py::test_a_study_of_an_axis_that_no_plugin_owns_is_refused",),
    ),
    Fault(
        "a picture whose groups forget who holds the same stacks",
        "titan/planner/picture/holdings.py",
        "if axis.name not in spread] + list(among.apart)",
        "if axis.name not in spread]",
        ("tests/unit/test_layout_picture.py::test_groups_are_those_of_the_mesh",),
    ),
    Fault(
        "a picture with shards of stacks over all ranks that share the rest",
        "titan/planner/picture/holdings.py",
        "found = Part(number, layout.remainder(axis)).within(found)",
        "found = _part(layout, rank, among).within(found)",
        ("tests/unit/test_layout_picture.py::test_a_cell_says_what_the_rank_holds",),
    ),
    Fault(
        "a picture that leaves out what stages send",
        "titan/planner/picture/holdings.py",
        "    if len(places) > 1:\n",
        "    if len(places) > 9:\n",
        ("tests/unit/test_layout_picture.py::test_every_exchange_of_the_planner_is_drawn",),
    ),
    Fault(
        "bytes between stages counted in one direction",
        "titan/planner/step/traffic.py",
        "link.count(place) for link",
        "(link[0] == place) for link",
        ("tests/unit/test_planned_memory.py::test_collectives_move_the_bytes_of_the_dry_run[1F1B]",),
    ),
)
