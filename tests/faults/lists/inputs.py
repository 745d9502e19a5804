"""Faults of what is read from a user: options, files, layouts, plugins."""

from titan.testing.faults import Fault

CONTRACT = "tests/contract/test_every_plugin.py::test_contract[optimizer-adamw-{}]"

FAULTS = (
    Fault(
        "bounds of options not checked",
        "titan/contracts/base/options.py",
        "check_bounds(value, declaration.spec)",
        "pass",
        (CONTRACT.format("bad_values_are_refused"),),
    ),
    Fault(
        "an unknown key accepted",
        "titan/contracts/base/options.py",
        "for key in table if key not in declared]",
        "for key in table if key == declared]",
        (CONTRACT.format("unknown_options_are_refused"),),
    ),
    Fault(
        "true accepted as 1",
        "titan/contracts/base/options.py",
        "if type(value) is hint or",
        "if isinstance(value, hint) or",
        ("tests/unit/test_options.py::test_toml_is_strict",),
    ),
    Fault(
        "an infinite number accepted",
        "titan/contracts/base/options.py",
        "if hint is float and not math.isfinite(value):",
        "if False:",
        ("tests/unit/test_bad_input.py::test_wrong_toml[infinite rate]",),
    ),
    Fault(
        "a layout of another number of ranks accepted",
        "titan/contracts/base/layout.py",
        "layout.world_size != world_size:",
        "layout.world_size < 0:",
        ("tests/unit/test_mesh.py::test_faults",),
    ),
    Fault(
        "two plugins of one name accepted",
        "titan/contracts/base/registry.py",
        "if owner is not None and (",
        "if owner is not None and False and (",
        ("tests/unit/test_registry.py::test_two_owners_of_a_name_are_both_named",),
    ),
    Fault(
        "heads that tensor parallelism cannot split accepted",
        "plugins/parallel/tensor/__init__.py",
        'yield f"[model] {key} = {count} cannot be split over',
        'yield from () and f"[model] {key} = {count} cannot be split over',
        ("tests/unit/test_tensor.py::test_heads_must_come_out_even_and_the_nearest_degrees_are_named",),
    ),
    Fault(
        "a pattern of a model's spec that matches nothing accepted",
        "titan/contracts/base/spec.py",
        "        if absent:\n            raise PluginError(\n                f\"the model's spec has names",
        "        if False:\n            raise PluginError(\n                f\"the model's spec has names",
        ("tests/dist/test_gradients.py::test_a_buffer_that_the_model_does_not_have_is_refused",),
    ),
    Fault(
        "an axis whose ranks all do the same work accepted",
        "titan/contracts/base/layout.py",
        'if (self.data, self.weights) == ("same", "copies"):',
        "if False:",
        ("tests/unit/test_mesh.py::test_facts_that_contradict_each_other",),
    ),
    Fault(
        "ranks that slice sequences and hold slices of weights accepted",
        "titan/contracts/base/layout.py",
        'if self.data == "sliced" and self.weights != "copies":',
        'if self.data == "sliced" and self.weights == "layers":',
        ("tests/unit/test_mesh.py::test_facts_that_contradict_each_other",),
    ),
    Fault(
        "an optional value refused without the word that leaves it out",
        "titan/contracts/base/options.py",
        'return ", or none" if',
        'return "" if',
        ("tests/unit/test_options.py::test_an_option_that_may_have_no_value_says_how_to_give_none",),
    ),
    Fault(
        "sequences sliced for a model whose attention nobody can replace",
        "titan/config/check.py",
        "if axes and not spec.attention:",
        "if len(axes) > 1 and not spec.attention:",
        ("tests/unit/test_attention.py::test_a_model_that_names_no_attention_is_not_sliced",),
    ),
    Fault(
        "a window refused that the sequence just fills",
        "titan/config/check.py",
        "if window <= length or",
        "if window < length or",
        ("tests/unit/test_attention.py::test_training_fills_the_window",),
    ),
    Fault(
        "a window that no sequence fills trained without a word",
        "titan/config/check.py",
        '            faults += _unfilled(job, spec, where("data"))\n',
        "            pass\n",
        ("tests/unit/test_attention.py::test_training_fills_the_window",),
    ),
    Fault(
        "given weights refused for their window",
        "titan/config/check.py",
        " or job.checkpoint.init_from:",
        ":",
        ("tests/unit/test_attention.py::test_training_fills_the_window",),
    ),
    Fault(
        "a trained model refused for a text that does not fill its window",
        "titan/config/load.py",
        '"unnamed", trains=False)',
        '"unnamed")',
        ("tests/unit/test_attention.py::test_a_trained_model_reads_sequences_that_fill_no_window",),
    ),
)
