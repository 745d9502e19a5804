"""What offloading keeps in the host's memory, by the plan and by the dry run, and what is refused."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.planned import CLUSTER, TOML, job_of
from tests.sweeps import sweep_but
from titan.cli import main
from titan.contracts import NamedParameter, on_host, update_some
from titan.errors import ConfigError
from titan.machine import check_host_memory, host_memory_gib
from titan.planner.dryrun import dry_run
from titan.planner.machine.host import short_of
from titan.planner.report.render import prediction_text
from titan.planner.search.best_first import search
from titan.planner.search.space import load_base
from titan.planner.search.unset_options import settle
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner
from titan.planner.trainer_api import persistent_gib
from titan.plugins.memory.offload.activations import Offloader, _Layer
from titan.plugins.memory.offload.link import Pairs, Way
from titan.plugins.memory.offload.state import streamed
from titan.plugins.optimizers.adamw import AdamW, Config
from titan.plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from titan.training.phases import wrapping

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

SMALL = ("--model.preset", "mini", "--model.n_layers", "4", "--data.seq_len", "256")
BATCH = ("--train.global_batch_size", "16", "--train.micro_batch_size", "2")
OPTIMIZER = ("--plugins.offload.optimizer", "true")
ACTIVATIONS = ("--plugins.offload.optimizer", "false", "--plugins.offload.activations", "true")
WITHIN = ("--plugins.update_in_backward.enabled", "true", "--train.grad_clip", "0")
GUESTS = Path(__file__).parents[1] / "guests"
PARAMETERS = ("--plugins.offload.parameters", "true")
RECOMPUTED = ("recomputed, full", "recomputed, selective")
WHAT = {"optimizer": OPTIMIZER, **dict.fromkeys(("activations", *RECOMPUTED), ACTIVATIONS)}
TWO = {"dp 2": ("--mesh.dp_shard", "2"), "tp 2": ("--mesh.tp", "2"), "pp 2": ("--mesh.pp", "2")}
LAYOUTS = {"one rank": (), **TWO}

KEPT = [*zip(WHAT, LAYOUTS, strict=True), ("optimizer", "dp 2")]
"""Each way and each layout once, and what a planted fault names."""


@pytest.mark.parametrize(("what", "layout"), sweep_but(product(WHAT, LAYOUTS), *KEPT))
def test_the_plan_is_the_dry_run(what: str, layout: str) -> None:
    given, words = (*SMALL, *BATCH, "--plugins.bf16.enabled", "true", *LAYOUTS[layout]), WHAT[what]
    if what.startswith("recomputed"):
        given += ("--plugins.activation_checkpoint.mode", what.rpartition(" ")[2])
    plain = dry_run(job_of(*given), 0)
    exact, job = dry_run(job_of(*given, *words), 0), job_of(*given, *words)
    planned = Planner(CLUSTER).draft(costs_of(job), job.layout).memory()[0]
    assert planned.allocated == pytest.approx(exact.peak_bytes, rel=0.03)
    assert planned.host == pytest.approx(exact.host_bytes, rel=0.03)
    assert exact.peak_bytes < (1 if what.startswith("recomputed") else 0.93) * plain.peak_bytes
    assert exact.host_bytes > 0 and plain.host_bytes == 0


def test_gradients_that_updates_within_the_backward_leave_are_in_the_same_place() -> None:
    words = (*SMALL, *BATCH[:2], "--mesh.dp_shard", "2", *PARAMETERS, "--train.grad_clip", "0")
    costs = costs_of(job_of(*words, "--plugins.update_in_backward.enabled", "true"))
    (one,) = (state for state in costs.state if state.component == "gradients")
    assert one.on_host and one.gathered_units == 1 and one.axes == costs.updated_over


@pytest.mark.parametrize(("layout", "stage"), [("one rank", "2"), ("dp 2", "1"), ("dp 2", "3"), ("pp 2", "3")])
def test_weights_on_the_host_are_planned_as_in_the_dry_run(layout: str, stage: str) -> None:
    sharded = (*LAYOUTS[layout], "--plugins.fsdp.zero_stage", stage)
    words = (*SMALL, *BATCH, "--plugins.bf16.enabled", "true", *sharded, *PARAMETERS)
    job, exact = job_of(*words), dry_run(job_of(*words), 0)
    planned = Planner(CLUSTER).draft(costs_of(job), job.layout).memory()[0]
    assert planned.allocated == pytest.approx(exact.peak_bytes, rel=0.03)
    assert planned.host == pytest.approx(exact.host_bytes, rel=0.03) == pytest.approx(16 * exact.parameters, rel=0.01)
    assert exact.steady["parameters"] == exact.steady["optimizer"] == 0


DDP = ("--mesh.dp_replicate", "2", "--plugins.fsdp.enabled", "false")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--mesh.tp", "2"), "along mesh.tp = 2 cannot sum them; set mesh.tp = 1"),
        (("--mesh.pp", "2", "--model.tied", "true"), "along mesh.pp = 2 cannot sum them; set mesh.pp = 1"),
        (DDP, r"requires gathered_parameters, .*; enable \[plugins.fsdp\], or set plugins.offload.parameters ="),
    ],
)
def test_weights_on_the_host_where_gradients_are_summed_later_are_refused(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=f"parameters = true: .*{told}"):
        job_of(*SMALL, *BATCH, *words, *PARAMETERS)


ROUNDED = ("--plugins.bf16.pure", "true")
ORDERS = {
    "rounded first": (*ROUNDED, *OPTIMIZER),
    "offloaded first": (*OPTIMIZER, *ROUNDED),
    "updated within, first": (*WITHIN, *OPTIMIZER, *ROUNDED),
}


@pytest.mark.parametrize("order", ORDERS)
def test_rounded_state_is_on_the_host_whatever_the_order_of_tables(order: str) -> None:
    """And the bits are those of the state on the device."""
    techniques = {one.name: one for one in wrapping(job_of(*SMALL, *ORDERS[order]).techniques)}
    within = ["update_in_backward"] if "within" in order else []
    assert [name for name in techniques if name in ("bf16", "offload", *within)] == ["bf16", "offload", *within]
    found = []
    for names in (("bf16",), tuple(techniques)):
        named = [NamedParameter("w", nn.Parameter(torch.linspace(-1, 1, 64).bfloat16()), "matrix", True)]
        optimizer = AdamW(Config(lr=0.1)).build(named)
        for name in names:
            optimizer = techniques[name].optimizer(optimizer, named)
        for _ in range(3):
            named[0].parameter.grad = torch.cos(named[0].parameter.detach())
            optimizer.step()
        state = {slot: value for slot, value in optimizer.state[named[0].parameter].items() if value.ndim}
        assert {value.dtype for value in state.values()} == {torch.bfloat16}
        assert [on_host(value) for value in state.values()] == [names != ("bf16",)] * 2
        found.append([named[0].parameter.detach(), *state.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_state_travels_once_per_update_and_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each parameter is updated by itself, and a step without gradients ends the update."""
    sent, waits, copy, finish = [], [], Way.copy, Way.finish

    def counted(way: Way, pairs: Pairs) -> Any:
        sent.append(len(pairs := list(pairs)))
        return copy(way, pairs)

    monkeypatch.setattr(Way, "copy", counted)
    monkeypatch.setattr(Way, "finish", lambda way: waits.append(finish(way)))
    weights = [nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(3)]
    named = [NamedParameter(f"w{number}", weight, "matrix", True) for number, weight in enumerate(weights)]
    optimizer = streamed(AdamW(Config(lr=0.1)).build(named), buffer_bytes=1024)  # two parameters' state
    for update in range(3):
        within, copies = update != 1, 2 * (1 if update == 0 else 2)  # two means; a first update fetches none
        sent.clear(), waits.clear()
        for weight in weights[:2]:
            weight.grad = torch.cos(weight.detach())
            if within:
                update_some(optimizer, [weight])
                weight.grad = None
        assert not waits
        optimizer.step()
        optimizer.zero_grad()
        assert sum(sent) == 2 * copies and len(waits) == 1
        assert all(on_host(value) for state in optimizer.state.values() for value in state.values() if value.ndim)
    assert torch.equal(weights[0], weights[1]) and set(optimizer.state) == set(weights[:2])


def test_all_state_travels_where_weights_are_switched() -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    inner = ScheduleFreeAdamW(ScheduleFreeAdamW.Config(lr=0.1)).build([NamedParameter("w", weight, "matrix", True)])
    optimizer: Any = streamed(inner, 1024)
    for _ in range(2):
        weight.grad = torch.ones(64)
        optimizer.step()
    optimizer.zero_grad()
    trained = weight.detach().clone()
    optimizer.eval()
    assert not torch.equal(weight, trained)
    tensors = {slot for slot, value in optimizer.state[weight].items() if isinstance(value, torch.Tensor)}
    assert tensors == {"z", "mean_square", "y"}
    assert on_host(optimizer.state[weight]["y"])
    optimizer.train()
    assert torch.equal(weight, trained)


def test_what_is_fetched_is_kept_until_it_is_there() -> None:
    """Also where nothing asks for it any more: else its memory would be another's while the copy writes to it."""
    offloader, module = Offloader(torch.device("cpu")), nn.Identity()
    layers, refs = [], []
    for _ in range(2):
        layer = _Layer(offloader, module, ((torch.ones(8),), {}), None)
        unpack = layer.pack(torch.ones(8))
        layer.leave()
        layer.left()
        layer.fetch()
        (kept,) = layer._kept
        layers.append(layer)
        refs.append(weakref.ref(kept().here))  # type: ignore[union-attr]
        del unpack, layer
        assert kept() is None and refs[-1]() is not None
    assert refs[0]() is None, "the second fetch waits for the first"
    layers[1].ready()
    assert refs[1]() is None


def test_an_optimizer_that_updates_all_together_is_refused_and_a_table_that_offloads_nothing_is_said() -> None:
    words, nothing = ("--plugins.path", str(GUESTS / "muon.py"), "--optimizer.name", "muon"), (OPTIMIZER[0], "false")
    with pytest.raises(ConfigError, match=r"optimizer = true: .* \[optimizer\] name = .muon. cannot; set plugins"):
        job_of(*SMALL, *words, *OPTIMIZER)
    (technique,) = (t for t in job_of(*SMALL, *words, *nothing).techniques if t.name == "offload")
    assert "so nothing is offloaded" in "".join(technique.no_effect(job_of(*SMALL).spec))


def test_tensors_whose_sizes_change_in_each_step_are_refused() -> None:
    words = ("--model.name", "moe", "--model.preset", "moe-tiny", "--mesh.ep", "2", *LAYOUTS["dp 2"], *ACTIVATIONS)
    with pytest.raises(ConfigError, match=r"activations = true: .* sends as many rows as the router chooses"):
        job_of(*words)


def test_a_host_with_too_little_memory_is_refused(tmp_path: Path) -> None:
    job = job_of(*SMALL, *BATCH, *OPTIMIZER, "--mesh.dp_shard", "2")
    [(_, gib)] = persistent_gib(job)
    assert gib == pytest.approx(17.01 / 1024, rel=1e-3) and persistent_gib(job_of(*SMALL))[0][1] == 0
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:      30720 kB\nMemAvailable:      3072 kB\n")
    with pytest.raises(ConfigError, match=r"keep 0\.03322 GiB .* 0\.01661 GiB for each of 2 ranks .* = 0\.0293 GiB"):
        check_host_memory(gib, 2, "they keep", host_memory_gib(meminfo))
    check_host_memory(gib, 1, "they keep", host_memory_gib(meminfo))
    check_host_memory(gib, 2, "they keep", host_memory_gib(tmp_path / "absent", tmp_path))
    limit = tmp_path / "memory.max"
    for text, refused in (("max", False), (str(2**30), False), (str(30 * 2**20), True)):
        limit.write_text(text)
        with pytest.raises(ConfigError, match=r"memory\.max") if refused else nullcontext():
            check_host_memory(gib, 2, "they keep", host_memory_gib(tmp_path / "absent", limit))


def test_the_plan_says_whether_the_host_has_the_memory() -> None:
    job = job_of(*SMALL, *BATCH, *OPTIMIZER, "--mesh.dp_shard", "2")
    costs = costs_of(job)
    for gib, fits in ((0.0, True), (0.034, True), (0.033, False)):
        cluster = replace(CLUSTER, device=replace(CLUSTER.device, host_memory_gib=gib))
        found = Planner(cluster).predict(costs, job.layout)
        said = short_of(cluster.memory, [memory.host for memory in found.memory], 2)
        assert found.fits == fits and ("host_memory_gib of the cluster file = 0.033 GiB" in said) != fits
        verdict = next(line for line in prediction_text(found, cluster, "", None).splitlines() if "peak " in line)
        assert verdict.startswith("fits: peak " if fits else "does NOT fit: peak ") and verdict.endswith(said or "GiB")


def test_layouts_that_the_host_has_too_little_memory_for_are_left_out(tmp_path: Path, capsys: Any) -> None:
    fixed = (*SMALL, "--train.global_batch_size=8", *OPTIMIZER, "--plugins.compile.enabled=false")
    base = load_base(TOML, fixed)
    found = search(base.job, Planner(CLUSTER), [base.space(4, 4)], keep=1000)
    kept = sorted(max(memory.host for memory in each.prediction.memory) for each in found.best)
    gib = 4 * (kept[0] + kept[-1]) / 2 / 2**30
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, host_memory_gib=gib))
    fitting = search(base.job, Planner(cluster), [base.space(4, 4)], keep=1000)
    assert 0 < len(fitting.best) < len(found.best) and all(each.prediction.fits for each in fitting.best)
    assert fitting.too_large and "host_memory_gib of the cluster file" in fitting.host_short

    small, best = tmp_path / "small.toml", tmp_path / "best.toml"
    small.write_text(
        '[device]\nname = "small"\nmemory_gib = 80\nbandwidth_gb_s = 1\nhost_memory_gib = 0.0001\n'
        '[device.peak_tflops]\nfloat32 = 1\n[[links]]\nname = "wire"\nbandwidth_gb_s = 1\n'
    )
    words = ["plan", "--config", str(TOML), "--cluster", str(small), *fixed]
    assert main([*words, "--search", "--world-size", "2", "--output", str(best)]) == 2 and not best.exists()
    assert "no layout fits into the memory of devices and host: " in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0
    assert "does NOT fit: techniques keep " in capsys.readouterr().out


def test_a_host_with_too_little_memory_decides_options_that_are_not_set() -> None:
    words = (*SMALL, *BATCH, *ACTIVATIONS, "--plugins.activation_checkpoint.mode", "auto")
    job = job_of(*words)
    most = max(m.host for m in Planner(CLUSTER).draft(costs_of(job), job.layout).memory()) / 2**30
    enough, short = (settle(job, CLUSTER.memory._replace(host_gib=factor * most)) for factor in (1.01, 0.99))
    assert enough[0] == job and short[0] != job and "in the host's memory" in short[1][0]


def test_the_update_takes_as_long_as_its_copies() -> None:
    unclipped = (*SMALL, *BATCH, "--train.grad_clip", "0")  # which is a pass of its own before an optimizer that wraps
    job = job_of(*unclipped, *OPTIMIZER)
    costs = costs_of(job)
    seconds = {}
    for bandwidth in (1.0, 2.0, 1e6):
        cluster = replace(CLUSTER, device=replace(CLUSTER.device, host_gb_s=bandwidth))
        seconds[bandwidth] = Planner(cluster).predict(costs, job.layout).time_s["optimizer"]
    whole = Planner(CLUSTER).predict(costs_of(job_of(*unclipped)), job.layout)
    assert seconds[1.0] == pytest.approx(8e-9 * job.spec.params) == 2 * seconds[2.0]
    assert seconds[1e6] == whole.time_s["optimizer"]
