"""The libraries of the attention kernels for CPUs: which there are, how they are compiled, and where they are kept."""

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from titan.plugins.attention import cpu_kernel
from titan.plugins.attention.cpu_kernel import cpu_attention, why_not

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "width", "said"),
    [
        ("cuda", torch.bfloat16, 32, "the kernel is for CPUs, not for device cuda"),
        ("cpu", torch.float16, 32, "the kernels compute in bfloat16 and float32, not in float16"),
        ("cpu", torch.bfloat16, 24, "a multiple of 16 features, at most 256, not of 24"),
        ("cpu", torch.bfloat16, 272, "a multiple of 16 features, at most 256, not of 272"),
    ],
)
def test_why_not(device: str, dtype: torch.dtype, width: int, said: str) -> None:
    assert said in why_not(torch.device(device), dtype, width)


WIDE = {"fma", "avx2", "avx512f"}
BF16 = {*WIDE, *cpu_kernel.FEATURES[torch.bfloat16]}


@pytest.mark.parametrize(
    ("flags", "vendor", "family", "outdone"),
    [
        ({"fma", "avx2"}, "GenuineIntel", "6", []),
        (WIDE, "GenuineIntel", "6", [torch.float32, torch.bfloat16]),
        (BF16, "GenuineIntel", "6", [torch.float32]),
        (BF16, "AuthenticAMD", "26", [torch.float32]),
        (BF16, "AuthenticAMD", "25", []),
        (WIDE, "AuthenticAMD", "25", [torch.bfloat16]),
    ],
    ids=["256 bits", "no bf16", "bf16", "Zen 5", "Zen 4", "Zen 4, no bf16"],
)
def test_pytorch_has_what_256_bits_would_compute_on_a_cpu_with_512(
    flags: set[str], vendor: str, family: str, outdone: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = {"flags": " ".join(flags), "vendor_id": vendor, "cpu family": family}
    monkeypatch.setattr(cpu_kernel, "first_core", lambda: core)
    assert [dtype for dtype in (torch.float32, torch.bfloat16) if cpu_kernel.outdone(dtype)] == outdone
    assert all("256 bits in float32" in cpu_kernel.outdone(dtype) for dtype in outdone)


def test_an_instruction_is_not_another_that_begins_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "first_core", lambda: {"flags": "fma4 avx2 avx512_fp16"})
    monkeypatch.setattr(cpu_kernel, "FEATURES", {torch.float32: ("fma", "avx2", "avx512_fp1")})
    assert cpu_kernel.kernel_library.__wrapped__(torch.float32) == "this CPU lacks fma, avx512_fp1"


def test_a_cpu_that_linux_does_not_describe_lacks_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert cpu_kernel.first_core.__wrapped__() == {}
    monkeypatch.setattr(cpu_kernel, "first_core", dict)
    assert "this CPU lacks fma, avx2" in cpu_kernel.kernel_library.__wrapped__(torch.float32)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, on a CPU that is said to have all; what the process had loaded is opened again when asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cpu_kernel, "FEATURES", dict.fromkeys(cpu_kernel.FEATURES, ()))
    cpu_kernel.kernel_library.cache_clear()
    yield tmp_path / "cache" / "titan" / "kernels"
    cpu_kernel.kernel_library.cache_clear()


def _why() -> str:
    return why_not(CPU, torch.bfloat16, 32)


def _why_anew() -> str:
    cpu_kernel.kernel_library.cache_clear()
    return _why()


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_without_the_instructions(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {torch.bfloat16: ("avx512f_of_tomorrow",), torch.float32: ("avx3", "avx1024")}
    monkeypatch.setattr(cpu_kernel, "FEATURES", lacking)
    assert _why() == "this CPU lacks avx3, avx1024"  # of the kernel that needs less
    q = torch.zeros(1, 1, 8, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="this CPU lacks"):
        cpu_attention(q, q, q)


def test_without_a_compiler(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -flag")
    assert _why() == "no C++ compiler was found (no-such-compiler); install one, or name it in CXX"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert _why_anew() == "no C++ compiler was found (g++, clang++, c++); install one, or name it in CXX"


def test_with_a_compiler_that_fails(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = "\n".join(f"echo line {number} >&2" for number in range(5))
    broken = _script(tmp_path / "c++", f'test "$1" = --version && exit 0\n{lines}\nexit 3')
    monkeypatch.setenv("CXX", broken)
    assert _why() == f"{broken} cannot compile the kernel (exit code 3): line 0 | line 1 | line 2"
    assert not list(anew.glob("*.so")) and not list(anew.glob("unfinished*"))


def test_with_a_compiler_that_makes_no_library_or_hangs(
    anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = _script(tmp_path / "c++", 'while test $# -gt 1; do test "$1" = -o && echo x > "$2"; shift; done')
    monkeypatch.setenv("CXX", odd)
    assert "the kernel cannot be loaded" in _why()
    monkeypatch.setattr(cpu_kernel, "COMPILER_LIMIT_S", 0.1)
    monkeypatch.setenv("CXX", _script(tmp_path / "c++", "exec sleep 60"))
    assert "took more than 0.1 s to compile the kernel" in _why_anew()


def test_with_a_cache_that_cannot_be_written(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    (tmp_path / f"titan-kernels-{os.getuid()}").write_text("another")
    monkeypatch.setenv("CXX", _script(tmp_path / "c++", "exit 0"))
    assert _why().startswith(f"the kernel cannot be kept: {anew}")
    assert _why().endswith("; set XDG_CACHE_HOME")


@pytest.fixture
def compiler(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A compiler in the place of the machine's, of what it would make; says how often it has compiled."""
    real = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if real is None:
        pytest.skip("no C++ compiler")
    small, calls = tmp_path / "made.so", tmp_path / "calls"
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int titan_attention_forward(const void*) { return 1; }')
    subprocess.run([real, "-shared", "-fPIC", "-o", small, source], check=True)
    calls.write_text("")
    copy = f'while test $# -gt 1; do test "$1" = -o && cp {small} "$2"; shift; done'
    text = f'test "$1" = --version && exit 0\necho compiled >> {calls}\nsleep 0.2\n{copy}'
    monkeypatch.setenv("CXX", _script(tmp_path / "c++", text))
    return lambda: len(calls.read_text().splitlines())


def test_compiled_once_and_kept(compiler: Callable[[], int], anew: Path) -> None:
    assert [_why_anew() for _ in range(2)] == ["", ""]
    assert compiler() == 1
    assert [path.suffix for path in sorted(anew.iterdir())] == [".lock", ".so"]


def test_the_cache_is_in_the_home_unless_the_environment_names_another(
    compiler: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, scratch = tmp_path / "me", tmp_path / "scratch"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    for named, folder in ((str(scratch), scratch), ("", home / ".cache"), ("relative", home / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert _why_anew() == ""
        [library] = tmp_path.rglob("attention-*.so")
        assert library.parent == folder / "titan" / "kernels"
        shutil.rmtree(folder)


def test_a_home_that_cannot_be_written_has_the_library_in_a_folder_of_this_user(
    compiler: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    own = tmp_path / f"titan-kernels-{os.getuid()}"
    assert [_why_anew() for _ in range(2)] == ["", ""]
    assert compiler() == 1 and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    assert f"; nor in {own}, which others can write: set XDG_CACHE_HOME" in _why_anew()
    real = own.rename(tmp_path / "real")
    real.chmod(0o700)
    own.symlink_to(real)
    assert f"; nor in {own}, which others can write: set XDG_CACHE_HOME" in _why_anew()


def test_a_machine_where_nothing_can_be_written_has_no_kernel(
    anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("CXX", _script(tmp_path / "c++", "exit 0"))
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert _why().startswith("environment: No usable temporary directory found in ['/tmp']; set TMPDIR to")


@pytest.mark.parametrize("damage", [lambda content: content[:5000], lambda content: b"", lambda content: content[::-1]])
def test_a_damaged_library_is_made_again(
    damage: Callable[[bytes], bytes], compiler: Callable[[], int], anew: Path
) -> None:
    assert _why() == ""
    [path] = anew.glob("*.so")
    whole = path.read_bytes()
    path.unlink()  # the loaded one stays as it is
    path.write_bytes(damage(whole))
    assert _why_anew() == "" and compiler() == 2
    assert path.read_bytes() == whole


def test_another_source_is_another_library(
    compiler: Callable[[], int], anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _why() == ""
    names = ("cpu_kernel_bfloat16.cpp", "cpu_kernel.h")
    for name in names:
        (tmp_path / name).write_bytes((cpu_kernel.SOURCES / name).read_bytes())
    monkeypatch.setattr(cpu_kernel, "SOURCES", tmp_path)
    for made, name in enumerate(names, start=2):
        with (tmp_path / name).open("a") as source:
            source.write("// another\n")
        assert _why_anew() == "" and compiler() == made and len(list(anew.glob("*.so"))) == made


def test_of_those_that_ask_at_once_one_compiles(compiler: Callable[[], int], anew: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(cpu_kernel.kernel_library.__wrapped__, [torch.float32] * 4))
    assert not any(isinstance(library, str) for library in opened) and compiler() == 1


def test_short_memory_is_said(compiler: Callable[[], int]) -> None:
    """The small library returns 1, as the kernel does."""
    q = torch.zeros(1, 1, 8, 32, dtype=torch.bfloat16)
    with pytest.raises(MemoryError, match=r"titan_attention_forward: no memory for copies of \[1, 1, 8, 32\]"):
        cpu_attention(q, q, q)
