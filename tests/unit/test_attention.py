"""What the contract's attention accepts in its place, and what is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.jobs import LLAMA, mesh
from tests.planned import job_of
from titan.config import Job, load_job, load_table
from titan.contracts import AttentionCore
from titan.errors import ConfigError, PluginError
from titan.training.phases import _check_names


class _Own(AttentionCore):
    """Half of the attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().attend(q, k, v, positions, documents) / 2


def _values(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
    return v


def test_another_operation_is_used() -> None:
    core, q = AttentionCore(), torch.randn(1, 2, 3, 4)
    core.use(_values, "one")
    assert core(q, q, q, torch.arange(3)[None]).equal(q)
    core.use(lambda *args: 2 * _values(*args), "two", wraps=True)
    assert core(q, q, q, torch.arange(3)[None]).equal(2 * q)


@pytest.mark.parametrize(
    ("core", "said"),
    [
        (AttentionCore(window=2), "technique one replaces attention, but does not follow its window of 2 positions"),
        (_Own(), "technique one replaces attention, but _Own computes attention of its own"),
    ],
    ids=["window", "own"],
)
def test_an_operation_that_leaves_something_out_is_refused(core: AttentionCore, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        core.use(_values, "one")
    core.use(_values, "one", wraps=True)


def test_two_operations_that_know_nothing_of_each_other_are_refused() -> None:
    core = AttentionCore()
    core.use(_values, "one")
    with pytest.raises(PluginError, match="techniques one and two both replace attention, and two, the later one"):
        core.use(_values, "two")


def _check_built(job: Job, **changes: Any) -> None:
    """Hold a model as its class builds it against its spec with these changes."""
    with torch.device("meta"):
        model = job.model.build()
    context: Any = SimpleNamespace(spec=replace(job.spec, **changes), job=job, mesh=SimpleNamespace(layout=job.layout))
    _check_names(model, context)


@pytest.mark.parametrize(
    ("globs", "said"),
    [
        (
            ("layers.0.attn.core",),
            r"layers\.1\.attn\.core is an AttentionCore that no glob of ModelSpec.attention names",
        ),
        (("layers.*.attn.core", "layers.*.ffn"), r"layers\.0\.ffn is no AttentionCore"),
    ],
    ids=["left out", "another"],
)
def test_the_spec_names_all_attention_and_nothing_else(globs: tuple[str, ...], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        _check_built(job_of(), attention=globs)


# --- sliced sequences ---------------------------------------------------------------------------------------------


def test_slices_of_sequences_need_an_operation_that_reaches_the_others() -> None:
    _check_built(job_of())
    with pytest.raises(PluginError, match=r"no technique gave layers\.0\.attn\.core an operation that reaches the pos"):
        _check_built(job_of(*mesh(cp=2)))


def test_a_model_that_names_no_attention_is_not_sliced() -> None:
    words = ["--data.path", "x", "--plugins.path", str(Path(__file__).parents[1] / "plugins")]
    bare = ["--model.name", "averager", "--plugins.tensor.enabled", "false"]
    load_job(LLAMA, [*words, *bare])
    said = r"\[mesh\] cp = 2: slices sequences, but the model names no attention in ModelSpec\.attention"
    with pytest.raises(ConfigError, match=said):
        load_job(LLAMA, [*words, *bare, *mesh(cp=2)])


# --- windows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.sliding_window", "17"], "seq_len 17, or a window of 16"),
        (["--model.name", "parallel", "--model.window", "33"], "a window of 16"),
    ],
    ids=["of the model's length", "beyond it"],
)
def test_training_fills_the_window(words: list[str], said: str, tmp_path: Path) -> None:
    guests = str(Path(__file__).parents[1] / "guests")
    words = ["--data.path", "x", "--plugins.path", guests, *words]
    load_job(LLAMA, [*words[:-1], "16"])
    window = words[-1]
    with pytest.raises(ConfigError) as refused:
        load_job(LLAMA, words)
    (fault,) = refused.value.faults
    told = f"no sequence fills the model's attention window of {window} positions; nearest that fit: {said}"
    assert fault.what == f"[data] seq_len = 16: {told}"
    load_job(LLAMA, [*words, "--checkpoint.init_from", str(tmp_path)])  # the window is that of other people's weights


def test_a_trained_model_reads_sequences_that_fill_no_window() -> None:
    job = job_of("--model.sliding_window", "33", "--data.seq_len", "33")
    job = load_table(dict(job.table), "a checkpoint", ["--data.seq_len", "8"])
    assert (job.data.seq_len, job.model.config.sliding_window) == (8, 33)
