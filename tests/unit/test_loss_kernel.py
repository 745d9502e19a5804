"""The Triton kernel of cross-entropy against the same in PyTorch.

Its compiler and its interpreter need Triton and no GPU; the rest needs a GPU: run that with `pytest -m gpu`.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titan.contracts import IGNORE, Projection
from titan.plugins.losses.cross_entropy import Config, CrossEntropy
from titan.plugins.losses.cross_entropy.rows import Slice, kernel_for, look, write_gradient

ROOT = Path(__file__).parents[2]
SIGNATURE = {"out": "*{0}", "logits": "*{0}", "labels": "*i64"}
SIGNATURE |= {"factor": "*fp32", "reported": "*fp32", "squared": "*fp32"}
SIGNATURE |= {"out_stride": "i32", "stride": "i32", "count": "i32", "words": "i32"}
SIGNATURE |= {"z_loss": "fp32", "ignore": "constexpr", "block": "constexpr", "stages": "constexpr"}


def test_arguments_of_kernels_have_annotations_of_triton_alone() -> None:
    """Triton's code generator looks up each annotation as a name of its own language, and fails on others."""
    for file in (ROOT / "plugins").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list):
                given = [arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg)] + [node.returns]
                assert {ast.unparse(each) for each in given if each} <= {"tl.constexpr"}, f"{file}: {node.name}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles(capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an A100, H100 and B200, with blocks fetched ahead. A cache of its own: it compiles each time."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from titan.plugins.losses.cross_entropy.kernel import BLOCK, STAGES, _rows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {name: kind.format(dtype) for name, kind in SIGNATURE.items()}
    constants = {"ignore": IGNORE, "block": BLOCK, "stages": STAGES}
    aligned = [list(SIGNATURE).index(name) for name in ("out", "logits", "out_stride", "stride", "words")]
    source = ASTSource(_rows, signature, constants, {(at,): [["tt.divisibility", 16]] for at in aligned})
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 16, "enable_fp_fusion": True}
    )
    assert made.asm["cubin"] and "cp.async.cg.shared.global" in made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024 // 2, "two programs share an SM"


def test_the_kernel_interpreted_is_what_pytorch_computes() -> None:
    pytest.importorskip("triton", minversion="3.7.1", reason="the interpreter of Triton before 3.7.1 needs numpy < 2.4")
    code = f"""
import torch
from {__name__} import compare
from titan.plugins.losses.cross_entropy import kernel
for words in (37, 8192, 20_000):
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for programs in (1, 7, 33):
            kernel.rows_at_once = lambda *_: programs
            found.append(compare("cpu", words, 0.01, dtype))
        assert all(torch.equal(x, y) for each in found[1:] for x, y in zip(found[0], each, strict=True))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [37, 8192, 50_257])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_kernel_is_what_pytorch_computes(words: int, z_loss: float, dtype: torch.dtype) -> None:
    assert kernel_for("cuda") is not None, "no triton beside a CUDA build of PyTorch"
    compare("cuda", words, z_loss, dtype)


def compare(device: str, words: int, z_loss: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The kernel against what PyTorch computes there. Returns the kernel's sums and gradient."""
    from titan.plugins.losses.cross_entropy.kernel import loss_and_gradient as kernel

    generator = torch.Generator(device).manual_seed(0)
    logits = (torch.randn(33, words, generator=generator, device=device) * 4).to(dtype)
    labels = torch.randint(words, (33,), generator=generator, device=device)
    labels[3], labels[4], labels[5] = IGNORE, words - 1, 0
    masked = min(words - 2, 8200)  # more than a block at once, and none of them a label
    logits[6, :masked], labels[6] = -torch.inf, words - 1
    factor, vocabulary = torch.tensor(0.25, device=device), Slice(0, words)
    rows = look(logits, labels, vocabulary)
    expected = torch.empty_like(logits)
    write_gradient(expected, logits, labels, rows, vocabulary, z_loss, factor)

    sums = kernel(logits, logits, labels, z_loss, factor)  # in place
    torch.testing.assert_close(sums, rows.sums(labels, z_loss), rtol=1e-6, atol=1e-6)
    bounds = {"rtol": 2**-7 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-7}
    torch.testing.assert_close(logits, expected, **bounds)
    return *sums, logits


@pytest.mark.parametrize(
    ("l2_mb", "sms", "row_bytes", "rows"),
    [(50, 132, 2 * 128_256, 132), (50, 132, 4 * 128_256, 68), (50, 132, 2 * 32_000, 528), (50, 132, 1 << 30, 1)],
)
def test_rows_in_work_fit_into_the_cache(
    l2_mb: int, sms: int, row_bytes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from titan.plugins.losses.cross_entropy import kernel

    properties = SimpleNamespace(L2_cache_size=l2_mb << 20, multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert kernel.rows_at_once.__wrapped__(row_bytes, torch.device("cuda", 0)) == rows


@pytest.mark.gpu
def test_a_label_outside_the_vocabulary_makes_the_loss_nan() -> None:
    kernel, logits = kernel_for("cuda"), torch.randn(2, 37, device="cuda")
    assert kernel is not None
    assert kernel(logits, logits, torch.tensor([1, 37], device="cuda"), 0.0, torch.ones((), device="cuda"))[0].isnan()


@pytest.mark.gpu
def test_chunks_on_a_gpu_are_all_logits_at_once() -> None:
    found = []
    for chunk in (64, 24):
        torch.manual_seed(1)
        head = torch.nn.Linear(48, 1000, bias=False, device="cuda")
        hidden = torch.randn(2, 32, 48, device="cuda", requires_grad=True)
        labels = torch.randint(1000, (2, 32), device="cuda")
        loss = CrossEntropy(Config(chunk_tokens=chunk, z_loss=0.01))
        objective, reported = loss.of_hidden(hidden, labels, Projection(head, head.forward, 1000))
        (objective * 0.37).backward()
        found.append((objective.detach(), reported, hidden.grad, head.weight.grad))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
