"""Causal attention on CPUs by kernels of titan's own: `cpu_kernel_bfloat16.cpp` and `cpu_kernel_float32.cpp`.

softmax(scale q k^T) v over the positions that a query sees: its own document's up to its own, within a window.

FlashAttention-2 (arXiv 2307.08691); backward recomputes the weights P from the log-sum-exp. With D = rowsum(dO O):

    dV = P^T dO,    dS = P (dO V^T - D),    dQ = scale dS K,    dK = scale dS^T Q,

of a key-value head summed over the queries that share it. Blocks of 64 x 64 in which no query sees a key are skipped.
One kernel multiplies in bfloat16 and adds in float32, on CPUs with AVX-512 BF16 (vdpbf16ps). The other computes in
float32 on those with AVX2 and FMA, and bfloat16 too where the first lacks instructions, and rounds results. Its
vectors have 256 bits, and it has been measured where a CPU computes no more at once, with AVX2 and on AMD's Zen 4
(`python -m bench.cpu_attention`): `auto` leaves to PyTorch what it would compute on other CPUs with AVX-512.

A kernel has a plain C interface, so it needs a C++ compiler, but neither PyTorch's headers nor OpenMP's. Compiled in
some seconds when it is first asked for, it is kept in `titan/kernels` of XDG_CACHE_HOME, by default `~/.cache`, or
else in a temporary folder of this user. Its name depends on the source, the compiler and its flags. It runs on the
threads of the OpenMP library that PyTorch has loaded, as many as PyTorch uses.

Cost: saves q, k, v, the output and 4 bytes per query and head.
    bfloat16   A thread takes a key-value head with its queries: 4 S N bytes in forward, 26 S N in backward. Where there
               are few heads for the threads, these share copies of whole tensors: k and v in forward, twice q, k and
               the gradient of the output, and v, in backward, which then has 7 products, not 5.
    float32    Copies k and v in forward. In backward a thread takes a head of queries: 36 S N bytes; where heads share
               keys, all of these keep their own gradients of keys and values, 8 B H S N bytes, to the end. For bfloat16
               it has copies of all tensors and results in float32.
Plans and dry runs count none of these copies.

Limits: head_dim a multiple of 16 up to 256; a positive scale; documents are runs of equal numbers. Results do not
depend on the number of threads. As with other kernels, NaN in a value reaches a few queries before it.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import math
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from titan.errors import ConfigError
from titan.layers.products import FLASH, FLASH_BACKWARD
from titan.paths import expanded, temporary_folder, told

_log = logging.getLogger("titan.attention")

SOURCES = Path(__file__).parent
"""The folder of the kernels' sources."""

_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread")
FEATURES = {
    torch.bfloat16: ("fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"),
    torch.float32: ("fma", "avx2"),
}
"""What the kernel of a dtype needs of a CPU, as Linux calls it; compilers know it without underscores."""

_MOST_FEATURES = 256
_DIGEST_BYTES = 32

COMPILER_LIMIT_S = 300
"""Longest wait for a compiler, in seconds."""


# --- the library ----------------------------------------------------------------------------------------------------


class _View(ctypes.Structure):
    """`View` of the source."""

    _fields_ = (("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64))


class _Problem(ctypes.Structure):
    """`Problem` of the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "length", "width", "window")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("parallel", "documents", "lse")),
        *((name, _View) for name in ("q", "k", "v", "out", "grad", "dq", "dk", "dv")),
    )


class _AbsentError(Exception):
    """The kernel cannot be had on this machine; says why."""


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why the kernel cannot compute attention of such tensors here, as a sentence; empty: it can.

    Compiles the kernel where that has not been done, which takes some seconds.
    """
    if device.type != "cpu":
        return f"the kernel is for CPUs, not for device {device.type}"
    if dtype not in FEATURES:
        return f"the kernels compute in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
    if head_dim % 16 or not 0 < head_dim <= _MOST_FEATURES:
        return f"the kernel is for heads of a multiple of 16 features, at most {_MOST_FEATURES}, not of {head_dim}"
    found = kernel_library(computed_in(dtype))
    return found if isinstance(found, str) else ""


def outdone(dtype: torch.dtype) -> str:
    """Why PyTorch's kernel may be faster here, as a sentence; empty: it is not."""
    # AMD's family 25 is Zen 3, which has no AVX-512, and Zen 4, which takes its vectors in halves.
    halves = (first_core().get("vendor_id"), first_core().get("cpu family")) == ("AuthenticAMD", "25")
    if computed_in(dtype) == torch.float32 and not _lacking(("avx512f",)) and not (halves and dtype == torch.float32):
        return "the kernel has vectors of 256 bits in float32, and this CPU has some of 512"
    return ""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the kernel for tensors of a dtype."""
    return torch.float32 if _lacking(FEATURES[dtype]) else dtype


@functools.cache
def kernel_library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The kernel of a dtype, or why there is none; found out once per process."""
    try:
        if lacking := _lacking(FEATURES[dtype]):
            raise _AbsentError(f"this CPU lacks {', '.join(lacking)}")
        build = _build(dtype)
        try:
            return _opened(build, _cache())
        except (ConfigError, OSError) as error:
            return _opened_elsewhere(build, error)
    except (_AbsentError, ConfigError) as error:
        return str(error)


class _Build(NamedTuple):
    """How a kernel is made: the command of a compiler, its flags, and the source."""

    compiler: list[str]
    flags: list[str]
    source: Path


def _build(dtype: torch.dtype) -> _Build:
    features = (f"-m{feature.replace('_', '')}" for feature in FEATURES[dtype])
    source = SOURCES / f"cpu_kernel_{str(dtype).removeprefix('torch.')}.cpp"
    return _Build(_compiler(), [*_FLAGS, *features], source)


def _cache() -> Path:
    """Where compiled kernels are kept. The XDG rule ignores a path that is not absolute."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else expanded("~/.cache", "XDG_CACHE_HOME")) / "titan" / "kernels"


def _opened_elsewhere(build: _Build, error: OSError | ConfigError) -> ctypes.CDLL:
    """The library from a temporary folder, where there is no cache or it cannot be written, as in a read-only home."""
    why = f"the kernel cannot be kept: {told(error, 'the cache') if isinstance(error, OSError) else error}"
    folder = temporary_folder() / f"titan-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # Anyone may write to the folder above, and the library's code is executed.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise _AbsentError(f"{why}; nor in {folder}, which others can write: set XDG_CACHE_HOME")
        return _opened(build, folder)
    except OSError as second:
        raise _AbsentError(f"{why}; nor in {folder}: {second.strerror or second}; set XDG_CACHE_HOME") from None


def _lacking(features: tuple[str, ...]) -> list[str]:
    """Those that this CPU does not have."""
    flags = f" {first_core().get('flags', '')} "
    return [feature for feature in features if f" {feature} " not in flags]


@functools.cache
def first_core() -> dict[str, str]:
    """What Linux says of the first core."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _compiler() -> list[str]:
    """The command of the compiler that CXX names, or of the first that is there."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    looked = named[0] if named else "g++, clang++, c++"
    raise _AbsentError(f"no C++ compiler was found ({looked}); install one, or name it in CXX")


def _opened(build: _Build, folder: Path) -> ctypes.CDLL:
    """The library from the cache, made there first if it is absent or damaged, by one process of those that ask."""
    compiler, flags, source = build
    words = (*compiler, _answer([*compiler, "--version"]), *flags)
    about = [source.read_bytes(), (SOURCES / "cpu_kernel.h").read_bytes(), *map(os.fsencode, words)]
    path = folder / f"attention-{hashlib.sha256(b'|'.join(about)).hexdigest()[:32]}.so"
    if not _is_whole(path):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _is_whole(path):
                _compile(build, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise _AbsentError(f"the kernel cannot be loaded: {error}") from None


def _is_whole(path: Path) -> bool:
    """Whether a library ends with the digest of all before it. The loader ignores it, but dies of half a file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for other processes that compile; on file systems without locks, each of them compiles."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(build: _Build, path: Path) -> None:
    """Make the library under another name, and rename it when it is whole."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="unfinished-") as folder:
        made = Path(folder) / "kernel.so"
        _answer([*build.compiler, *build.flags, "-o", str(made), str(build.source)])
        with made.open("ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(path)
    seconds = time.monotonic() - began
    _log.info(f"attention: compiled {build.source.name} by {build.compiler[0]} in {seconds:.1f} s: {path}")


def _answer(command: list[str]) -> str:
    """What a command of the compiler prints.

    Raises:
        _AbsentError: it fails; holds the first lines of what it said.
    """
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            timeout=COMPILER_LIMIT_S,
            check=False,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise _AbsentError(f"{command[0]} took more than {COMPILER_LIMIT_S} s to compile the kernel") from None
    if done.returncode:
        said = " | ".join(line.strip() for line in done.stderr.splitlines()[:3]) or "it said nothing"
        raise _AbsentError(f"{command[0]} cannot compile the kernel (exit code {done.returncode}): {said}")
    return done.stdout


@functools.cache
def gomp_parallel() -> int:
    """Address of GOMP_parallel of the OpenMP library that PyTorch has loaded; 0: the kernel starts threads itself."""
    # A second OpenMP library would have threads of its own, which spin beside those of the first.
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


# --- operations -----------------------------------------------------------------------------------------------------


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int = 0, documents: Tensor | None = None
) -> Tensor:
    """Causal attention of q [B, H, S, N] to k and v [B, K, S, N], H a multiple of K; returns [B, H, S, N].

    The result lies in memory as [B, S, H, N], as PyTorch's does.

    Args:
        q, k, v: of one dtype, for which `why_not` has no objection.
        scale: factor of the products of queries and keys, above 0; None: 1 / sqrt(N).
        window: positions that a query sees, its own among them; 0: all up to its own.
        documents: [B, S] int64; a query sees those before it up to where the number changes. None: all.

    Raises:
        ValueError: shapes, dtypes, scale or window are others.
        RuntimeError: the kernel is not there (`why_not`).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    batch, heads, length, width = q.shape
    if k.shape != v.shape or k.shape != (batch, k.shape[1], length, width) or heads % k.shape[1]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: not [B, H, S, N] and [B, K, S, N]")
    if width % 16 or not 0 < width <= _MOST_FEATURES or q.dtype not in FEATURES or not q.dtype == k.dtype == v.dtype:
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype} with {width} features per head"
        raise ValueError(f"{dtypes}: not all bfloat16 or all float32, with a multiple of 16 up to 256")
    if documents is not None and (documents.shape != (batch, length) or documents.dtype != torch.int64):
        raise ValueError(f"documents {list(documents.shape)} of {documents.dtype}: not {[batch, length]} of int64")
    if not scale > 0 or window < 0:
        raise ValueError(f"scale {scale}, window {window}: not above 0, and not 0 or more")
    out: Tensor = _attention(q, k, v, documents, scale, window)[0]
    return out


@library.custom_op("titan::cpu_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """(output as of `cpu_attention`, natural log of the sums of the softmax [B, H, S] float32)."""
    if q.is_meta:
        return FLASH(q, k, v, 0.0, True, scale=scale)[:2]  # type: ignore[no-any-return]
    if (wide := computed_in(q.dtype)) != q.dtype:
        out, lse = _attention(q.to(wide), k.to(wide), v.to(wide), documents, scale, window)
        return out.to(q.dtype), lse
    out, lse = _results(q, k, v, documents, scale, window)
    _call("titan_attention_forward", documents, scale, window, lse, q=q, k=k, v=v, out=out)
    return out, lse


@library.custom_op("titan::cpu_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.is_meta:
        return FLASH_BACKWARD(grad, q, k, v, out, lse, 0.0, True, scale=scale)  # type: ignore[no-any-return]
    if (wide := computed_in(q.dtype)) != q.dtype:
        given = [tensor.to(wide) for tensor in (grad, q, k, v, out)]
        dq, dk, dv = _attention_backward(*given, lse, documents, scale, window)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    dq, dk, dv = _like(q), _like(k), _like(v)
    tensors = {"q": q, "k": k, "v": v, "out": out, "grad": grad, "dq": dq, "dk": dk, "dv": dv}
    _call("titan_attention_backward", documents, scale, window, lse, **tensors)
    return dq, dk, dv


def _like(x: Tensor) -> Tensor:
    """A tensor for results of x's shape [B, H, S, N], which lies in memory as [B, S, H, N], as models use it next."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


@_attention.register_fake
def _results(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, *output, documents)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad, *ctx.saved_tensors, *ctx.constants), None, None, None


_attention.register_autograd(_gradients, setup_context=_keep)

OPERATIONS = (torch.ops.titan.cpu_attention.default,)
"""Operations whose results selective recomputation saves."""


def _call(name: str, documents: Tensor | None, scale: float, window: int, lse: Tensor, **tensors: Tensor) -> None:
    """Call a function of the library; the tensors are those of its `Problem`."""
    found = kernel_library(tensors["q"].dtype)
    if isinstance(found, str):
        raise RuntimeError(found)
    # Rows must not have gaps between their numbers; what lies between rows, heads and sequences does not matter.
    kept = {key: x if x.stride(-1) == 1 else x.contiguous() for key, x in tensors.items()}
    documents = None if documents is None else documents.contiguous()
    batch, heads, length, width = tensors["q"].shape
    problem = _Problem(
        batch,
        heads,
        tensors["k"].shape[1],
        length,
        width,
        window,
        scale,
        torch.get_num_threads(),
        gomp_parallel(),
        0 if documents is None else documents.data_ptr(),
        lse.data_ptr(),
        **{key: _View(x.data_ptr(), *x.stride()[:3]) for key, x in kept.items()},
    )
    if getattr(found, name)(ctypes.byref(problem)):
        raise MemoryError(f"{name}: no memory for copies of {list(tensors['q'].shape)} and its keys and values")
