"""One CUDA device against the CPU. Run with `pytest -m gpu`; each test also runs with the CPU in the GPU's place."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoints import assert_same
from tests.jobs import SAVING, run_with_state
from titan.layers.attention import AttentionCore
from titan.plugins.attention.backend.by_document import attend_by_document
from titan.testing.jobs import assert_same_curve, train_job

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "words", [(), ("--plugins.activation_checkpoint.mode", "selective")], ids=["plain", "recompute"]
)
def test_a_device_draws_the_curve_of_the_cpu(tmp_path: Path, device: str, words: tuple[str, ...]) -> None:
    """In fp32, from the weights of one checkpoint: initial weights differ between devices."""
    train_job(tmp_path, 1, *SAVING, "--train.steps", "4", "--run.device", "cpu", name="before")
    start = ("--checkpoint.init_from", str(tmp_path / "before"))
    expected = train_job(tmp_path, 1, *start, "--run.device", "cpu", name="cpu")
    assert_same_curve(expected, train_job(tmp_path, 1, *start, *words, "--run.device", device, name="device"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path: Path, device: str) -> None:
    words = (*SAVING, "--run.device", device, "--run.deterministic", "true")
    whole = train_job(tmp_path, 1, *words, name="whole", run=run_with_state)
    train_job(tmp_path, 1, *words, "--train.steps", "4", name="pieces")
    pieces = train_job(tmp_path, 1, *words, name="pieces", run=run_with_state)
    assert_same(whole.weights, pieces.weights)
    assert whole.loss == pieces.loss and sorted(whole.rows) == [1, 2, 3, 4, 5, 6]


PACKED = ("--data.packing", "document_mask", "--model.dim", "64")
WINDOW = ("--model.sliding_window", "5")
GPU = pytest.mark.gpu
IN_FP32 = [
    ("cpu", "documents", WINDOW),
    pytest.param("cuda", "efficient", WINDOW, marks=GPU),
    pytest.param("cuda", "math", WINDOW, marks=GPU),
    pytest.param("cuda", "flex", WINDOW, marks=GPU),
    pytest.param("cuda", "auto", (), marks=GPU),
]


@pytest.mark.parametrize(("device", "backend", "words"), IN_FP32)
def test_a_backend_of_attention_draws_the_curve_of_the_cpu(
    tmp_path: Path, device: str, backend: str, words: tuple[str, ...]
) -> None:
    train_job(tmp_path, 1, *PACKED, *SAVING, "--train.steps", "4", "--run.device", "cpu", name="before")
    start = (*PACKED, *words, "--checkpoint.init_from", str(tmp_path / "before"))
    expected = train_job(tmp_path, 1, *start, "--run.device", "cpu", name="cpu")
    given = ("--run.device", device, "--plugins.attention.backend", backend)
    assert_same_curve(expected, train_job(tmp_path, 1, *start, *given, name="device"))


IN_BF16 = [
    ("cpu", "documents", (*PACKED, *WINDOW)),
    pytest.param("cuda", "varlen", (*PACKED, *WINDOW), marks=GPU),
    pytest.param("cuda", "varlen", (*PACKED, "--plugins.activation_checkpoint.mode", "selective"), marks=GPU),
    pytest.param("cuda", "flash", PACKED[2:], marks=GPU),
    pytest.param("cuda", "cudnn", PACKED[2:], marks=GPU),
    pytest.param("cuda", "flex", (*PACKED, "--plugins.compile.enabled", "true"), marks=GPU),
]


@pytest.mark.parametrize(("device", "backend", "words"), IN_BF16)
def test_a_backend_of_attention_in_bfloat16(tmp_path: Path, device: str, backend: str, words: tuple[str, ...]) -> None:
    """As close to SDPA as two layouts are to each other in bfloat16 on a CPU."""
    words = (*words, "--plugins.bf16.enabled", "true", "--run.device", device)
    expected = train_job(tmp_path, 1, *words, name="sdpa")
    ours = train_job(tmp_path, 1, *words, "--plugins.attention.backend", backend, name="ours")
    assert ours.loss == pytest.approx(expected.loss, rel=6e-5)
    assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 40])
def test_attention_by_document_is_attention_with_a_mask(device: str, window: int) -> None:
    """Operation and gradients, in bfloat16 against float32; grouped heads."""
    draws, core = torch.Generator().manual_seed(1), AttentionCore(window=window)
    inputs = [torch.randn(2, heads, 300, 64, generator=draws).to(device) for heads in (4, 2, 2)]
    documents = (torch.arange(300) // torch.tensor([[70], [130]])).to(device)
    positions = torch.arange(300, device=device).expand(2, -1)
    found = []
    for attend, dtype in ((core, torch.float32), (partial(attend_by_document, core), torch.bfloat16)):
        own = [t.to(dtype).requires_grad_() for t in inputs]
        out = attend(*own, positions, documents)
        found.append([t.float() for t in (out, *torch.autograd.grad(out.float().square().sum(), own))])
    for exact, ours in zip(*found, strict=True):
        assert (ours - exact).norm() < 0.01 * exact.norm()
