"""Faults of what is kept in the host's memory."""

from titan.testing.faults import Fault

DIST = "tests/dist/test_offload.py"
UNIT = "tests/unit/test_offload.py"

CODES = "tests/unit/test_adamw_8bit.py"

FAULTS = (
    Fault("a refusal that does not say what to enable", "titan/contracts/plugin/registry.py::lacking",
        '[p.name for p in of_kind("technique") if capability in (p.name, *getattr(p, "provides", ()))]', "list[str]()",
        (f"{UNIT}::test_weights_on_the_host_where_gradients_are_summed_later_are_refused",)),
    Fault("the largest negative number of a block not kept", "plugins/optimizers/adamw_8bit/codes.py::_map",
        "(-1.0, *sorted(-each for each in magnitudes)[1:], 0.0, *sorted(magnitudes), 1.0)",
        "(*sorted(-each for each in magnitudes), 0.0, *sorted(magnitudes), 1.0)",
        (f"{CODES}::test_codes_of_numbers_that_come_from_codes_are_the_same[True]",)),
    Fault("small mean squares that become 0", "plugins/optimizers/adamw_8bit/codes.py::boundaries_of",
        "middles if signed else [0.0, *middles[1:]]", "middles",
        (f"{CODES}::test_the_largest_of_a_block_is_exact_and_nothing_positive_becomes_0",)),
    Fault("state of the last bucket not taken back to the host", "plugins/memory/offload/state.py::_Streamed._store",
        "self._out.copy(pairs)", "self._out.copy(pairs[:-1])", (f"{DIST}::test_state_of_the_optimizer[one rank]",)),
    Fault("a layer's tensors let go of before they are copied",
        "plugins/memory/offload/activations.py::Offloader._end",
        "layer.leave()", "", (f"{DIST}::test_what_layers_save[one rank]",), nth=(2, 2)),
    Fault("weights that are to be on the host on the device",
        "plugins/parallel/fsdp.py::FullyShardedDataParallel.apply",
        'context.job.stating("weights_on_host")', "False",
        (f"{DIST}::test_the_units_of_weights_on_the_host_have_the_policy",)),
    Fault("what is on the host counted as the device's", "planner/dryrun/watch.py::Watch.hold",
        "HOST if on_host(local) else self._trained.get(component, component)",
        "self._trained.get(component, component)", (f"{UNIT}::test_the_plan_is_the_dry_run[optimizer-dp 2]",)),
    Fault("the optimizer wrapped in the order of the TOML", "titan/training/phases.py::wrapping",
        'sorted(techniques, key=lambda t: ("updates_in_backward" in t.facts(), "state_on_host" in t.facts()))',
        "list(techniques)",
        (f"{UNIT}::test_rounded_state_is_on_the_host_whatever_the_order_of_tables[offloaded first]",)),
    Fault("state of parameters without gradients that travels in each step",
        "plugins/memory/offload/state.py::_Streamed.step",
        "[parameter for parameter in everything if parameter.grad is not None]", "everything",
        (f"{UNIT}::test_state_travels_once_per_update_and_the_host_waits_once",)),
    Fault("a host that waits after the update of each parameter", "plugins/memory/offload/state.py::_Streamed.step",
        "len(everything) == self._count", "everything",
        (f"{UNIT}::test_state_travels_once_per_update_and_the_host_waits_once",)),
    Fault("memory given away while a copy writes to it", "plugins/memory/offload/activations.py::_Layer.fetch",
        "[one.here for one in kept if one.here is not None]", "[]",
        (f"{UNIT}::test_what_is_fetched_is_kept_until_it_is_there",)),
    Fault("float8 maxima of weights on the host", "plugins/precision/float8.py::Float8._check_gather",
        'job.stating("weights_on_host")', "()",
        ("tests/unit/test_float8.py::test_a_float8_gather_needs_one_scale_and_something_to_gather",)),
    Fault("a node's memory held against one rank's share", "titan/machine.py::check_host_memory",
        "each_gib * ranks > available", "each_gib > available",
        (f"{UNIT}::test_a_host_with_too_little_memory_is_refused",)),
)
