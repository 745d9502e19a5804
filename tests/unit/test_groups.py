"""Groups of parameters in the TOML: which options each gets, what is refused, and the optimizer that they make."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from titan.config import Job, load_job
from titan.config.changes import compare
from titan.config.groups import GroupedOptimizer, listed
from titan.config.schema import schema
from titan.contracts import NamedParameter, update_some
from titan.contracts.optimizers import JoinedOptimizer, joined
from titan.errors import ConfigError
from titan.testing.jobs import JOB

NAMES = {
    "embed.weight": ("table", (11, 4)),
    "layers.0.attn.wq.weight": ("matrix", (4, 4)),
    "layers.0.experts.w1.weight": ("matrix", (2, 4, 4)),
    "layers.0.attn_norm.weight": ("vector", (4,)),
    "output.weight": ("head", (11, 4)),
}


def _job(groups: str, *words: str) -> Job:
    return load_job(JOB, ["--data.path", ".", "--optimizer.groups", groups, *words])


def _parameters() -> list[NamedParameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        NamedParameter(name, nn.Parameter(torch.randn(shape, generator=generator)), kind, kind in ("matrix", "head"))  # type: ignore[arg-type]
        for name, (kind, shape) in NAMES.items()
    ]


def _options(optimizer: torch.optim.Optimizer, named: list[NamedParameter], option: str) -> dict[str, Any]:
    names = {id(each.parameter): each.name for each in named}
    return {names[id(p)]: group[option] for group in optimizer.param_groups for p in group["params"]}


def test_each_parameter_has_the_options_of_its_group_and_else_those_of_the_table() -> None:
    named = _parameters()
    job = _job('[{match = ["table", "head"], lr = 2e-3}, {match = "layers.*.attn.*.weight", betas = [0.5, 0.6]}]')
    optimizer = job.optimizer.build(named)
    rates = {name: 2e-3 if name in ("embed.weight", "output.weight") else 3e-4 for name in NAMES}
    assert _options(optimizer, named, "lr") == rates
    betas = {name: (0.5, 0.6) if ".attn." in name else (0.9, 0.95) for name in NAMES}
    assert _options(optimizer, named, "betas") == betas


@pytest.mark.parametrize(("word", "name"), [*zip(("table", "matrix", "expert", "vector", "head"), NAMES, strict=True)])
def test_a_word_means_a_kind_and_leaves_stacks_to_experts(word: str, name: str) -> None:
    plugin = _job('[{match = "matrix", lr = 0.5}]').optimizer
    assert isinstance(plugin, GroupedOptimizer)
    group = replace(plugin.groups[0], match=(word,))
    assert [each.name for each in _parameters() if group.takes(each.name, each.kind, each.parameter.ndim)] == [name]


def test_a_weight_decay_that_a_group_states_applies_to_all_of_it() -> None:
    named = _parameters()
    plugin = _job('[{match = "vector", weight_decay = 0.3}, {match = "table", lr = 1.0}]').optimizer
    found = _options(plugin.build(named), named, "weight_decay")
    assert found["layers.0.attn_norm.weight"] == 0.3
    assert found["embed.weight"] == 0.0
    assert found["output.weight"] == 0.1
    assert "weight decay 0.3 in 1 tensors" in plugin.describe(named).splitlines()[1]


def test_an_option_of_a_group_counts_before_what_takes_its_place_in_the_table() -> None:
    """Muon's AdamW has a rate and a decay of its own, for which a group's `lr` and `weight_decay` stand too."""
    words = ["--optimizer.name", "muon", "--optimizer.adamw_lr", "3e-4", "--optimizer.adamw_weight_decay", "0.2"]
    groups = '[{match = "head", lr = 0.5}, {match = "vector", weight_decay = 0.0}, {match = "table", adamw_lr = 0.7}]'
    named = _parameters()
    optimizer = _job(groups, *words).optimizer.build(named)
    rates, decays = (_options(optimizer, named, option) for option in ("lr", "weight_decay"))
    assert (rates["output.weight"], decays["output.weight"]) == (0.5, 0.2)
    assert (rates["layers.0.attn_norm.weight"], decays["layers.0.attn_norm.weight"]) == (3e-4, 0.0)
    assert (rates["embed.weight"], decays["embed.weight"]) == (0.7, 0.0)
    optimizer = _job('[{match = "vector", adamw_weight_decay = 0.3}]', *words).optimizer.build(named)
    assert _options(optimizer, named, "weight_decay")["layers.0.attn_norm.weight"] == 0.3


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ('[{match = "layers.*.atn.wq.weight"}]', "'layers.*.atn.wq.weight' matches no parameter (did you mean "),
        ('[{match = "matrx"}]', "[optimizer.groups.0] match: 'matrx' matches no parameter (did you mean 'matrix'"),
        (
            '[{match = "expert"}]',
            "'expert' matches no parameter: the model has none of that kind, only 'head', 'matrix', 'table', 'vector'",
        ),
        ('[{match = "matrix"}, {match = "layers.*.attn.wq.weight"}]', "layers.0.attn.wq.weight is also in the group"),
        ('[{match = "matrix", lrr = 1.0}]', "groups.0] lrr: unknown key (did you mean 'lr'"),
        ('[{match = "matrix", zzz = 1.0}]', "zzz: unknown key (known: betas, decay_all, eps, lr, match, weight_decay)"),
        ('[{match = "matrix", lr = -1.0}]', "groups.0] lr = -1.0: must be above 0"),
        ("[{lr = 1.0}]", "match: missing; name parameters by a glob, or by one of 'matrix'"),
        ("[{match = 3}]", "match = 3: must be a list of strings, or a string"),
        ("3", "groups: must be a list of tables, [[optimizer.groups]]"),
        ("'head'", "groups: must be a list of tables, [[optimizer.groups]]"),
        ("[{match='head' lr=}]", "[{match='head' lr=}]: is not TOML; write it as [{match = 'head', lr = 1e-3}]"),
    ],
)
def test_bad_groups_are_refused_with_a_sentence(groups: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        _job(groups)
    assert "command line: " in str(raised.value), "which set the groups"


@pytest.mark.parametrize("name", ["lion", "adafactor", "adamw_8bit", "schedule_free_adamw", "sgd"])
def test_each_group_is_described_with_its_options(name: str) -> None:
    named, words = _parameters(), ("--lr_schedule.name", "constant", "--optimizer.name", name, "--optimizer.lr", "0.25")
    line = _job("[]", *words).optimizer.describe(named)
    assert line.startswith(f"{name}: 0.00014 M parameters in 5 tensors, lr = 0.25, ")
    rest, head = _job('[{match = "head", lr = 0.5}]', *words).optimizer.describe(named).splitlines()
    assert rest.startswith(f"4 tensors: {name}: 9.6e-05 M parameters in 4 tensors, lr = 0.25, ")
    assert head.startswith(f"  group match = 'head', 1 tensors: {name}: 4.4e-05 M parameters in 1 tensors, lr = 0.5, ")


def test_a_group_of_an_optimizer_that_says_nothing_has_no_empty_tail() -> None:
    silent: Any = SimpleNamespace(config=None, describe=lambda parameters: "")
    assert GroupedOptimizer(silent, ()).describe(_parameters()) == "5 tensors"


def test_groups_stay_when_another_optimizer_is_named(tmp_path: Path) -> None:
    below, above, words = tmp_path / "below.toml", tmp_path / "above.toml", ["--data.path", "."]
    text = f'base = "{JOB}"\n[optimizer]\nname = "adamw"\n[[optimizer.groups]]\nmatch = "matrix"\n'
    below.write_text(f"{text}lr = 1.0\n")
    above.write_text('base = "below.toml"\n[optimizer]\nname = "sgd"\n')
    for job in (load_job(above, words), load_job(below, [*words, "--optimizer.name", "sgd"])):
        assert job.table["optimizer"]["name"] == "sgd"
        assert job.table["optimizer"]["groups"] == [{"match": "matrix", "lr": 1.0}]
        assert isinstance(job.optimizer, GroupedOptimizer)
    none = load_job(above, [*words, "--optimizer.groups", "[]"])
    assert type(none.optimizer).__name__ == "SGD" and "groups" not in none.table["optimizer"]
    below.write_text(f"{text}eps = 1.0\n")
    with pytest.raises(ConfigError, match=r"\[optimizer\.groups\.0\] eps: unknown key"):
        load_job(above, words)


def test_a_resolved_job_has_the_groups_and_a_resume_names_their_change() -> None:
    job = _job('[{match = "matrix", lr = 2e-3}]')
    assert job.table["optimizer"]["groups"] == [{"match": "matrix", "lr": 2e-3}]
    assert _job(json.dumps(job.table["optimizer"]["groups"]).replace(":", " =")).table == job.table
    saved = {"config": load_job(JOB, ["--data.path", "."]).table}
    (said,) = compare(saved, job.table, "").said
    assert said == (
        "optimizer.groups = [{'match': 'matrix', 'lr': 0.002}], the checkpoint has unset: takes effect at the next step"
    )


def test_the_schema_has_groups() -> None:
    entry = schema()["properties"]["optimizer"]["properties"]["groups"]["items"]["properties"]
    assert {"match", "lr", "betas", "momentum"} <= entry.keys() and "name" not in entry


def test_joined_optimizers_are_one_with_one_state() -> None:
    named = _parameters()
    plugin = _job('[{match = "matrix", lr = 2e-3}]').optimizer
    assert plugin.separable and plugin.name == "adamw"
    whole, twin = plugin.build(named), plugin.build(copies := _parameters())
    assert type(whole).__name__ == "AdamW" and whole._step_supports_amp_scaling  # type: ignore[attr-defined]
    for each in (*named, *copies):
        each.parameter.grad = torch.cos(each.parameter.detach())
    whole.step()
    assert set(whole.state) == {each.parameter for each in named}
    for each in reversed(copies):
        update_some(twin, [each.parameter])
    assert all(torch.equal(a.parameter, b.parameter) for a, b in zip(named, copies, strict=True))
    before = [each.parameter.detach().clone() for each in named]
    whole.found_inf = torch.ones(())  # type: ignore[attr-defined]
    whole.step()
    assert all(torch.equal(each.parameter, old) for each, old in zip(named, before, strict=True))


def test_joined_optimizers_of_joined_ones_have_one_state_too() -> None:
    named = _parameters()
    whole = _job('[{match = "layers.*.attn.*.weight", lr = 2e-3}]', "--optimizer.name", "muon").optimizer.build(named)
    assert type(whole).__name__ == "Muon" and isinstance(whole, JoinedOptimizer)
    for each in named:
        each.parameter.grad = torch.cos(each.parameter.detach())
    whole.step()
    slots = {each.name: set(whole.state[each.parameter]) for each in named}
    matrices = {name for name, (kind, _) in NAMES.items() if kind == "matrix"}
    assert slots == {name: {"momentum"} if name in matrices else {"step", "exp_avg", "exp_avg_sq"} for name in NAMES}
    assert all(member.state is whole.state for member in whole.optimizers)


def test_what_skips_an_update_reaches_each_of_joined_ones_that_are_joined() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    first, *others = (torch.optim.AdamW([parameter], fused=True) for parameter in parameters)
    whole = joined([first, joined(others)])
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    assert whole._step_supports_amp_scaling  # type: ignore[attr-defined]
    whole.found_inf = torch.ones(())  # type: ignore[attr-defined]
    whole.step()
    assert all(torch.equal(parameter, torch.ones(3)) for parameter in parameters)


@pytest.mark.parametrize("pure", [(), ("--plugins.bf16.pure", "true", "--plugins.bf16.rounding", "kahan")])
def test_state_of_a_checkpoint_waits_where_the_optimizer_inside_says(pure: tuple[str, ...]) -> None:
    job = _job('[{match = "matrix", lr = 2e-3}]', "--optimizer.name", "adamw_8bit", *pure)
    named = _parameters()
    whole = job.optimizer.build(named)
    for technique in job.techniques if pure else ():
        whole = technique.optimizer(whole, named)
    parameter = torch.empty(3, device="meta")
    assert whole.state_like(parameter, dtype=torch.float32).device.type == "cpu"  # type: ignore[attr-defined]


def test_state_waits_beside_parameters_unless_all_joined_ones_look_elsewhere() -> None:
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(3))]) for _ in range(2))
    first.state_like = torch.zeros_like  # type: ignore[attr-defined]
    assert not hasattr(joined([first, second]), "state_like")


def test_one_optimizer_that_asks_the_host_makes_all_ask() -> None:
    fused = torch.optim.AdamW([nn.Parameter(torch.ones(3))], fused=True)
    both = joined([fused, torch.optim.SGD([nn.Parameter(torch.ones(3))])], "Both")
    assert not both._step_supports_amp_scaling and type(both).__name__ == "Both"  # type: ignore[attr-defined]


def test_a_plan_lists_groups_with_their_options() -> None:
    job = _job('[{match = ["head", "table"], lr = 2e-3}]')
    assert listed(job.optimizer) == ["optimizer group match = ['head', 'table']: lr = 0.002"]
    assert listed(load_job(JOB, ["--data.path", "."]).optimizer) == []
