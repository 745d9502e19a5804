"""What the contract's attention accepts in its place, and what is refused."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.jobs import LLAMA, mesh
from tests.planned import job_of
from titan.config import Job, load_job, load_table
from titan.errors import ConfigError, PluginError
from titan.inference.cache import Cache
from titan.layers.attention import AttentionCore, attention_cost
from titan.training.phases import check_names


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
    with pytest.raises(PluginError, match="techniques one and two both replace attention, and two, the later one"):
        core.use(_values, "two")
    core.use(lambda *args: 2 * _values(*args), "two", wraps=True)
    assert core(q, q, q, torch.arange(3)[None]).equal(2 * q)


@pytest.mark.parametrize(
    ("core", "said"),
    [
        (AttentionCore(window=2), "technique one replaces attention, but does not follow its window of 2 positions"),
        (AttentionCore(scale=0.5), "does not follow its scale of 0.5"),
        (AttentionCore(soft_cap=50.0), "does not follow its soft cap of 50.0"),
        (AttentionCore(slopes=(0.5, 0.25)), "does not follow its ALiBi slopes of 2 heads"),
        (_Own(), "technique one replaces attention, but _Own computes attention of its own"),
    ],
)
def test_an_operation_that_leaves_something_out_is_refused(core: AttentionCore, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        core.use(_values, "one")
    core.use(_values, "one", wraps=True)


def test_an_operation_is_used_for_what_it_follows_alone() -> None:
    core = AttentionCore(window=2, scale=0.5, slopes=(0.5,))
    with pytest.raises(PluginError, match="does not follow its window of 2 positions and its ALiBi slopes of 1 heads"):
        core.use(_values, "one", follows=("scale",))
    with pytest.raises(PluginError, match=r"technique one follows 'slope' of attention \(did you mean 'slopes'\?\)"):
        core.use(_values, "one", follows=("slope",))  # type: ignore[arg-type]
    core.use(_values, "one", follows=("slopes", "window", "scale"))
    assert core.operation is _values


SLOPES = (0.5, 0.25, 0.125, 0.0625)
CORES: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "slopes": {"slopes": SLOPES},
    "slopes, scores written": {"slopes": SLOPES, "writes_scores": True},
    "slopes, window, scale": {"slopes": SLOPES, "window": 3, "scale": 0.3},
    "soft cap": {"soft_cap": 1.5},
    "soft cap, window, scale": {"soft_cap": 0.5, "window": 4, "scale": 0.9},
    "all": {"soft_cap": 0.5, "window": 4, "scale": 0.9, "slopes": SLOPES},
}


def _by_definition(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """One score after the other, in float64."""
    out = torch.zeros_like(q, dtype=torch.float64)
    rows, heads, length, n = q.shape
    for row, head, at in product(range(rows), range(heads), range(length)):
        seen = [
            key
            for key in range(at + 1)
            if at - key < (core.window or length) and (documents is None or documents[row, at] == documents[row, key])
        ]
        scores = []
        for key in seen:
            pair = q[row, head, at].double() @ k[row, head * k.shape[1] // heads, key].double()
            score = pair * (n**-0.5 if core.scale is None else core.scale)
            score = core.soft_cap * (score / core.soft_cap).tanh() if core.soft_cap else score
            scores.append(score - (core.slopes[head] if core.slopes else 0.0) * (at - key))
        values = v[row, head * k.shape[1] // heads, seen].double()
        out[row, head, at] = torch.stack(scores).softmax(0) @ values
    return out


@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", CORES.values(), ids=CORES)
def test_attention_is_its_definition(options: dict[str, Any], kv_heads: int, packed: bool) -> None:
    draws, core = torch.Generator().manual_seed(3), AttentionCore(**options)
    q, k, v = (torch.randn(2, heads, 7, 8, generator=draws) for heads in (4, kv_heads, kv_heads))
    documents = torch.tensor([[0] * 3 + [1] * 4, [0] * 7]) if packed else None
    positions = torch.arange(7).expand(2, -1)
    expected = _by_definition(core, q, k, v, documents).float()
    torch.testing.assert_close(core(q, k, v, positions, documents), expected, rtol=1e-5, atol=1e-6)
    compiled = torch.compile(core, backend="aot_eager", fullgraph=True)
    if packed and kv_heads == 2:
        torch.testing.assert_close(compiled(q, k, v, positions, documents), expected, rtol=1e-5, atol=1e-6)
    # As on the second of two ranks that share the heads.
    core.first_head = 2
    own = core(q[:, 2:], k[:, kv_heads // 2 :], v[:, kv_heads // 2 :], positions, documents)
    torch.testing.assert_close(own, expected[:, 2:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", CORES.values(), ids=CORES)
def test_attention_with_a_cache_is_that_of_the_whole_rows(options: dict[str, Any], kv_heads: int) -> None:
    """Rows of 3 and 5 tokens of 5, then two more each, then one."""
    draws, core = torch.Generator().manual_seed(4), AttentionCore(**options)
    q, k, v = (torch.randn(2, heads, 8, 8, generator=draws) for heads in (4, kv_heads, kv_heads))
    whole, cache = core(q, k, v, torch.arange(8).expand(2, -1)), Cache(8)
    for starts, width in (([0, 0], 5), ([3, 5], 2), ([5, 7], 1)):
        positions = cache.place(starts, width, q.device)
        at = positions[:, None, :, None]
        new = [t.gather(2, at.expand(-1, t.shape[1], -1, 8)) for t in (q, k, v)]
        with cache.attached(core):
            got = core(*new, positions)
        torch.testing.assert_close(got, whole.gather(2, at.expand_as(got)), rtol=1e-5, atol=1e-6)


def test_a_soft_cap_saves_the_tanh_beside_the_softmax() -> None:
    saved: list[Tensor] = []
    q, k, v = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        AttentionCore(soft_cap=1.0)(q, k, v, torch.arange(16)[None])
    scores = {t.untyped_storage().data_ptr() for t in saved if t.numel() == 2 * 16 * 16 and t.dtype == torch.float32}
    cost = attention_cost(2, 2, 8, soft_cap=True)
    assert cost.scores_written
    assert len(scores) * 2 == sum(kept.numel for kept in cost.saved if kept.scores) == 4


def _check_built(job: Job, **changes: Any) -> None:
    """Hold a model as its class builds it against its spec with these changes."""
    with torch.device("meta"):
        model = job.model.build()
    context: Any = SimpleNamespace(spec=replace(job.spec, **changes), job=job, mesh=SimpleNamespace(layout=job.layout))
    check_names(model, context)


def test_the_spec_names_all_attention_and_nothing_else() -> None:
    left_out = r"layers\.1\.attn\.core is an AttentionCore that no glob of ModelSpec.attention names"
    with pytest.raises(PluginError, match=left_out):
        _check_built(job_of(), attention=("layers.0.attn.core",))
    with pytest.raises(PluginError, match=r"layers\.0\.ffn is no AttentionCore"):
        _check_built(job_of(), attention=("layers.*.attn.core", "layers.*.ffn"))


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.sliding_window", "17"], "seq_len 17, or a window of 16"),  # of the model's length
        (["--model.name", "parallel", "--model.window", "33"], "a window of 16"),  # beyond it
    ],
)
def test_training_fills_the_window(words: list[str], said: str, tmp_path: Path) -> None:
    words = ["--data.path", "x", "--plugins.path", str(Path(__file__).parents[1] / "guests"), *words]
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
