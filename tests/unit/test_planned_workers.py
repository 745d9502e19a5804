"""The planner on workers with weights of their own: traffic, time, memory, samples, searches."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planned import CLUSTER, TOML, job_of, predicted
from titan.cli import main
from titan.errors import ConfigError
from titan.planner.picture.traffic import moved
from titan.planner.report import closed_form
from titan.planner.search.space import load_base
from titan.planner.step.layout import costs_of

STEPS = "--plugins.local_steps."
WORKERS = ("--mesh.worker", "2", "--mesh.dp_shard", "4", "--train.global_batch_size", "16")


def test_an_exchange_follows_the_shards_whatever_the_order_of_tables() -> None:
    steps, shards = (STEPS + "every", "4"), ("--plugins.fsdp.zero_stage", "1")
    one, other = (costs_of(job_of(*WORKERS, *words)) for words in ((*steps, *shards), (*shards, *steps)))
    assert one == replace(other, order=one.order)
    exchange = [cost for cost in one.collectives if cost.axes == ("worker",)]
    assert [cost.sharded_over for cost in exchange] == [("dp_shard", "cp")] * 2


@pytest.mark.parametrize(("form", "bytes_each"), [("fp32", 4), ("int8", 1 + 4 / 256), ("int4", 0.5 + 4 / 256)])
def test_workers_exchange_what_a_rank_has_of_the_weights_once_in_h_steps(form: str, bytes_each: float) -> None:
    job = job_of(*WORKERS, STEPS + "every", "8", STEPS + "exchange", form)
    found = moved(0, costs_of(job), job.layout)
    for kind in ("all_to_all", "all_gather"):
        assert found[kind, ("worker",)] == pytest.approx(bytes_each * job.spec.params / 4 / 8, rel=1e-12)


def test_an_exchange_crosses_the_outermost_link_and_waits_once_in_h_steps() -> None:
    """Four ranks of a node each have a quarter of the weights, and a link of 10 GB/s to the other node."""
    inner, outer = CLUSTER.links
    slow = replace(CLUSTER, links=(inner, replace(outer, latency_us=100.0)))
    params = job_of().spec.params
    for fragments in (1, 2):
        words = (*WORKERS, STEPS + "every", "8", STEPS + "fragments", str(fragments))
        sent = 2 * (1 / 2) * (4 * params / 4) / 10e9 / 8
        assert predicted(*words).time_s["worker"] == pytest.approx(sent, rel=1e-9)
        waited = predicted(*words, cluster=slow).time_s["worker"] - sent
        assert waited == pytest.approx(2 * fragments / 8 * 100e-6, rel=1e-9)


def test_a_worker_is_planned_as_a_run_of_its_own_beside_others() -> None:
    """As many tokens for each rank as alone, the state of a worker over its ranks, and no gradient to other workers."""
    two = predicted(*WORKERS, STEPS + "every", "8")
    alone = predicted("--mesh.dp_shard", "4", "--train.global_batch_size", "8")
    assert two.tokens == 2 * alone.tokens == 16 * 64 and two.world_size == 2 * alone.world_size
    assert two.memory[0].parameters == alone.memory[0].parameters
    assert two.memory[0].optimizer == alone.memory[0].optimizer
    assert two.time_s["dp"] == pytest.approx(alone.time_s["dp"], rel=1e-9)
    assert two.time_s["forward"] == pytest.approx(alone.time_s["forward"], rel=1e-9)
    assert sum(two.time_s.values()) == pytest.approx(two.step_time_s, rel=1e-9)
    piped = ("--mesh.pp", "2", "--train.micro_batch_size", "1")
    alone = predicted(*piped, "--train.global_batch_size", "8")
    two = predicted(*piped, "--mesh.worker", "2", "--train.global_batch_size", "16", STEPS + "every", "8")
    assert two.timeline.idle == pytest.approx(alone.timeline.idle, rel=1e-9)


def test_what_workers_agreed_on_is_state_of_a_shard() -> None:
    plain, nesterov, offloaded = (
        predicted(*WORKERS, *(word for name, value in given.items() for word in (STEPS + name, value))).memory[0]
        for given in ({"every": "8"}, {"outer": "nesterov"}, {"outer": "nesterov", "offload": "true"})
    )
    assert nesterov.optimizer == 2 * plain.optimizer and offloaded.optimizer == plain.optimizer


def test_the_report_names_the_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(TOML), *WORKERS, STEPS + "every", "1"]) == 0
    assert re.search(r"^exchange between workers +\d", capsys.readouterr().out, re.M)


def test_state_is_not_shared_over_workers_in_formulas() -> None:
    report = closed_form.report(job_of(*WORKERS, STEPS + "every", "8"))
    assert report["state"]["data_parallel_ranks"] == 4 and report["training"]["devices"] == 8
    said = "must be a multiple of the 1 model-parallel ranks x 2 workers; nearest: 2 or 4"
    with pytest.raises(ConfigError, match=said):
        closed_form.report(job_of(*WORKERS), devices=3)


def test_a_search_keeps_the_workers_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drifting = tmp_path / "drifting.toml"
    drifting.write_text(f'base = "{TOML}"\n[mesh]\nworker = 2\n[plugins.local_steps]\nevery = 8\n')
    for config, words, workers, least in (
        (drifting, ["--train.global_batch_size=16"], 2, 9),
        (drifting, ["--mesh.worker=4"], 4, 4),
        (TOML, ["--plugins.local_steps.enabled=true"], 1, 9),
    ):
        layouts = list(load_base(config, words).space(8, 4).layouts())
        assert {layout.degree("worker") for layout in layouts} == {workers}
        assert len({str(layout) for layout in layouts}) >= least
    assert main(["plan", "--config", str(drifting), "--search", "--world-size", "7"]) == 2
    assert "7 ranks cannot be split with mesh.worker = 2" in capsys.readouterr().err


def test_a_search_proposes_no_workers_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", str(TOML), "--search", "--world-size", "2", "--train.global_batch_size", "4"]
    words += ["--mesh.pp", "1", "--mesh.tp", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {layout["layout"]["mesh.worker"] for layout in found["layouts"]} == {1}
    assert "local_steps" in found["left_out"]
    assert main(words) == 0
    assert "--mesh.worker N" in capsys.readouterr().out.splitlines()[-1]
