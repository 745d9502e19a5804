"""What the contract's attention accepts in its place, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.planned import job_of
from titan.contracts import AttentionCore
from titan.errors import PluginError
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
    job = job_of()
    with torch.device("meta"):
        model = job.model.build()
    context: Any = SimpleNamespace(
        spec=replace(job.spec, attention=globs), job=job, mesh=SimpleNamespace(layout=job.layout)
    )
    with pytest.raises(PluginError, match=said):
        _check_names(model, context)
