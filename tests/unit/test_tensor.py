"""What `[plugins.tensor]` refuses before anything starts."""

import re
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from titan.config import load_job
from titan.contracts import Axis
from titan.contracts.base.layout import Layout
from titan.errors import ConfigError
from titan.planner.step.layout import costs_of
from titan.plugins.models.llama import Llama, LlamaConfig
from titan.plugins.parallel.tensor import TensorConfig, TensorParallel
from titan.testing.jobs import JOB

CP = Axis(name="cp", data="sliced", weights="copies", topology_order=30, doc="")


def _sentences(tp: int, cp: int = 1, seq_len: int = 16, sequence_parallel: bool = True, **sizes: int) -> list[str]:
    layout = Layout((CP, *TensorParallel.axes), {"cp": cp, "tp": tp})
    job = SimpleNamespace(layout=layout, data=SimpleNamespace(seq_len=seq_len))
    spec = Llama(LlamaConfig(**{"dim": 96, "n_heads": 12, "n_kv_heads": 6, "vocab_size": 251, **sizes})).spec()
    return list(TensorParallel(TensorConfig(sequence_parallel=sequence_parallel)).check(job, spec))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "cp", "seq_len"), [(1, 1, 16), (2, 1, 16), (1, 2, 15)])
def test_what_fits_is_not_refused_and_one_rank_splits_nothing(tp: int, cp: int, seq_len: int) -> None:
    assert _sentences(tp, cp, seq_len) == []


def test_heads_must_come_out_even_and_the_nearest_degrees_are_named() -> None:
    assert _sentences(4) == ["[model] n_kv_heads = 6 cannot be split over mesh.tp = 4; nearest tp that fits: 3 or 6"]
    both = _sentences(5, seq_len=20)
    assert [sentence.split(" cannot")[0] for sentence in both] == ["[model] n_kv_heads = 6", "[model] n_heads = 12"]


def test_heads_that_are_not_grouped_are_named_once() -> None:
    expected = "[model] n_heads = 12 cannot be split over mesh.tp = 8; nearest tp that fits: 6 or 12"
    assert _sentences(8, n_kv_heads=12) == [expected]


def test_sequences_must_come_out_even_only_where_they_are_split() -> None:
    (sentence,) = _sentences(2, cp=2, seq_len=18)
    assert sentence == (
        "[data] seq_len = 18 cannot be split over mesh.tp = 2 times 2 other ranks of a sequence; "
        "nearest seq_len that fits: 16 or 20, or set sequence_parallel = false"
    )
    assert _sentences(2, seq_len=17, sequence_parallel=False) == []


@pytest.mark.parametrize(
    ("size", "few", "enough", "what"), [("vocab_size", 8, 11, "word"), ("ffn_dim", 15, 16, "hidden unit")]
)
def test_every_rank_needs_a_word_and_a_hidden_unit(size: str, few: int, enough: int, what: str) -> None:
    expected = f"[model] {size} = {few} leaves some of the mesh.tp = 6 ranks without a {what}"
    assert _sentences(6, seq_len=18, **{size: few}) == [expected]
    assert _sentences(6, seq_len=18, **{size: enough}) == []


FLOAT8 = ("--plugins.float8.recipe", "rowwise_with_gw_hp", "--model.dim", "64", "--model.ffn_dim", "128")
AUTO = ("--run.device", "auto", "--data.path", "any")
ASYNC = ("--mesh.tp", "2", "--plugins.tensor.async_tp", "true", "--plugins.compile.enabled", "true")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--mesh.tp", "1"), "async_tp = true needs mesh.tp above 1, as one rank sends nothing; set async_tp = false"),
        (("--run.device", "cpu"), 'async_tp = true needs GPUs, and [run] device = "cpu"; set async_tp = false'),
        (
            ("--plugins.tensor.sequence_parallel", "false"),
            "async_tp = true pipelines all-gathers and reduce-scatters; sequence_parallel = false makes none",
        ),
        (
            ("--plugins.compile.enabled", "false"),
            "async_tp = true requires compiled_layers, which no enabled technique provides; enable [plugins.compile]",
        ),
        (
            ("--plugins.compile.backend", "aot_eager"),
            'layers, and [plugins.compile] backend = "aot_eager" does not use it; set backend = "inductor"',
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_pipelined_is_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_job(JOB, [*AUTO, *ASYNC, *words])


@pytest.mark.parametrize(("per_node", "refused"), [("", False), ("8", False), ("2", True), ("6", True)])
def test_ranks_of_tp_share_a_node(per_node: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", per_node) if per_node else monkeypatch.delenv("LOCAL_WORLD_SIZE", False)
    sentence = f"needs the 4 ranks of mesh.tp in one node, and nodes have {per_node} ranks; lower mesh.tp"
    with pytest.raises(ConfigError, match=sentence) if refused else nullcontext():
        load_job(JOB, [*AUTO, *ASYNC, "--model.n_kv_heads", "4", "--mesh.tp", "4"])


def _shares(*words: str) -> dict[tuple[str, str, bool], float]:
    """(collective, phase, overlaps) of a layer over tp -> how many there are."""
    found: dict[tuple[str, str, bool], float] = defaultdict(float)
    for cost in costs_of(load_job(JOB, [*AUTO, "--mesh.tp", "2", *words])).collectives:
        if cost.axes == ("tp",) and cost.where == "layer":
            found[cost.collective, cost.when, cost.overlaps] += cost.count
    return found


def test_a_plan_hides_half_of_what_the_compiler_pipelines() -> None:
    without, with_it = _shares(), _shares(*ASYNC)
    halved = [("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "forward")]
    for kind, when in halved:
        assert without[kind, when, False] == 2
        assert with_it[kind, when, False] == with_it[kind, when, True] == 1
    assert with_it["reduce_scatter", "backward", False] == 2
    assert sum(with_it.values()) == sum(without.values())


def test_a_plan_hides_nothing_beside_products_in_float8() -> None:
    assert not any(overlaps for *_, overlaps in _shares(*ASYNC, *FLOAT8))
