"""What a process takes of its machine, `titan.machine`, and that ranks and launchers do."""

import ctypes
import os
import re
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from titan.config import load_job
from titan.errors import EXIT_DONE
from titan.machine import (
    ALLOCATOR,
    DESCRIPTORS,
    HOST_ALLOCATOR,
    cores_near,
    keep_freed_memory,
    let_segments_expand,
    on_this_device,
    raise_descriptor_limit,
    stay_near,
)
from titan.ranks import launcher, process
from titan.ranks.meeting.launch_env import LaunchEnv
from titan.ranks.meeting.same_job import Statement
from titan.ranks.rank_processes import RankProcesses
from titan.testing.jobs import run_job, train_job
from titan.testing.ranks import run_ranks
from titan.training import build

Limits = tuple[int, int]


def _raised(before: Limits, act: Callable[[], None]) -> Limits:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    act()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _enter() -> None:
    process.enter(process.here("cpu"), timeout_s=60.0)


def _launch() -> None:
    RankProcesses.lead = lambda self: []  # type: ignore[method-assign]
    launcher.start(lambda argv: EXIT_DONE, [], LaunchEnv(1, 0, 1, "127.0.0.1", 0), Statement())


@pytest.mark.parametrize("act", [raise_descriptor_limit, _enter, _launch])
def test_the_soft_limit_of_descriptors_becomes_the_hard_one(act: Callable[[], None]) -> None:
    assert run_ranks(_raised, 1, (256, 4000), act, init=False) == [(4000, 4000)]


def test_a_limit_that_is_higher_or_refused_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Mock(side_effect=ValueError("not allowed to raise maximum limit"))
    monkeypatch.setattr(resource, "setrlimit", refused)
    for limits in ((2 * DESCRIPTORS, resource.RLIM_INFINITY), (4000, 4000), (resource.RLIM_INFINITY,) * 2):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        raise_descriptor_limit()
    refused.assert_not_called()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    raise_descriptor_limit()
    refused.assert_called_once_with(resource.RLIMIT_NOFILE, (DESCRIPTORS, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("given", "hip", "found"),
    [
        ({}, None, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, "7.0", {}),
        *(({name: "max_split_size_mb:128"}, None, {name: "max_split_size_mb:128"}) for name in ALLOCATOR),
        ({"PYTORCH_ALLOC_CONF": ""}, None, {"PYTORCH_ALLOC_CONF": ""}),
    ],
)
def test_segments_expand_on_nvidia_gpus_unless_the_user_has_set_the_allocator(
    given: dict[str, str], hip: str | None, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    with patch.dict(os.environ, given, clear=True):
        let_segments_expand()
        assert os.environ == found


def test_a_rank_on_a_gpu_sets_the_allocator_before_it_touches_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(process, "let_segments_expand", lambda: calls.append("allocator"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: calls.append(f"device {index}"))
    process.here("auto")
    assert calls == ["allocator", "device 0"]


@pytest.mark.gpu
def test_segments_of_a_gpu_expand(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as the allocator reads its options once."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert run_ranks(_segments, 1, init=False) == [[torch.version.hip is None]]


def _segments() -> list[bool]:
    held = torch.ones(2**20, device=process.here("cuda").device)
    return [segment["is_expandable"] for segment in torch.cuda.memory_snapshot() if held.numel()]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
@pytest.mark.parametrize(("chosen", "kept"), [({}, 256), ({HOST_ALLOCATOR[0]: "1048576"}, 0)], ids=["default", "set"])
def test_a_rank_on_a_cpu_keeps_the_memory_that_it_frees(chosen: dict[str, str], kept: int) -> None:
    """In a process of its own, as what is set stays set."""
    assert run_ranks(_mib_kept, 1, 256, chosen, init=False) == [kept]


def _mib_kept(mib: int, chosen: dict[str, str]) -> int:
    """Of a block of this size that was held and freed, what the process still holds, in steps of 32 MiB."""
    torch.set_num_threads(1)
    for name in (*HOST_ALLOCATOR, "GLIBC_TUNABLES"):
        os.environ.pop(name, None)
    os.environ.update(chosen)
    keep_freed_memory(torch.device("cpu"))
    torch.ones(1)  # the first use of a kernel reads in its code
    before = _resident_mib()
    torch.ones(mib << 18)
    return 32 * round((_resident_mib() - before) / 32)


def _resident_mib() -> int:
    """Counted page by page; what `statm` has may be late."""
    found = re.search(r"^Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) >> 10


KEPT = [(-1, -1), (-4, 0)]
"""What malloc.h calls M_TRIM_THRESHOLD: nothing is given back; and M_MMAP_MAX: nothing has a mapping of its own."""


@pytest.mark.parametrize(
    ("given", "calls"),
    [
        ({}, KEPT),
        *(({name: ""}, []) for name in HOST_ALLOCATOR),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0:glibc.malloc.trim_threshold=1"}, []),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, KEPT),
    ],
)
def test_what_the_user_has_set_of_the_host_s_allocator_stands(
    given: dict[str, str], calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *numbers: made.append(numbers)))
    with patch.dict(os.environ, given, clear=True):
        keep_freed_memory(torch.device("cuda"))
        assert not made
        keep_freed_memory(torch.device("cpu"))
    assert made == calls


def _keeping(folder: str, words: list[str], config: str) -> dict[str, torch.Tensor]:
    kept: list[str] = []
    build.keep_freed_memory = lambda device: kept.append(device.type)  # type: ignore[attr-defined]
    weights = run_job(folder, words, config)
    assert kept == ["cpu"]
    return weights


def test_a_run_keeps_memory_once_it_is_built(tmp_path: Path) -> None:
    assert train_job(tmp_path, 1, "--train.steps", "1", run=_keeping).weights


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    keep_freed_memory(torch.device("cpu"))


GPU = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=2)
"""Its place on the bus is 0001:c1:02.0."""


def _machine(folder: Path, online: str, nodes: list[str], gpu_node: int) -> Path:
    """The parts of sysfs that count: the cores of the machine and of each NUMA node, and the node of `GPU`."""
    lists = {"devices/system/cpu/online": online, "bus/pci/devices/0001:c1:02.0/numa_node": str(gpu_node)}
    lists |= {f"devices/system/node/node{node}/cpulist": cores for node, cores in enumerate(nodes)}
    for name, text in lists.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


TWO_NODES = ["0-3,8-11", "4-7,12-15"]


@pytest.mark.parametrize(
    ("nodes", "gpu_node", "allowed", "near"),
    [
        (TWO_NODES, 1, range(16), {4, 5, 6, 7, 12, 13, 14, 15}),
        (TWO_NODES, 0, range(16), {0, 1, 2, 3, 8, 9, 10, 11}),
        (TWO_NODES, 1, range(8), set()),  # a scheduler has chosen
        (TWO_NODES, -1, range(16), set()),  # the kernel does not know the node
        (["0-15"], 0, range(16), set()),
        (["0-15", ""], 1, range(16), set()),  # a node of memory alone
    ],
    ids=["second node", "first node", "bound already", "unknown", "one node", "no cores"],
)
def test_cores_near_a_gpu_are_those_of_its_numa_node(
    nodes: list[str], gpu_node: int, allowed: range, near: set[int], tmp_path: Path
) -> None:
    assert cores_near(GPU, _machine(tmp_path, "0-15", nodes, gpu_node), set(allowed)) == near


def test_a_gpu_without_a_place_is_near_to_nothing(tmp_path: Path) -> None:
    assert cores_near(SimpleNamespace(name="a GPU"), _machine(tmp_path, "0-15", TWO_NODES, 0), set(range(16))) == set()
    assert cores_near(GPU, tmp_path / "absent", set(range(16))) == set()


def _bound(folder: str) -> list[object]:
    """The cores of each thread of a rank that is bound, the number of threads of an operation, and a second attempt."""
    torch.cuda.get_device_properties = lambda device: GPU  # type: ignore[assignment]
    torch.set_num_threads(8)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)  # was there before
    thread.start()
    assert stay_near(torch.device("cpu"), Path(folder)) == set()
    near = stay_near(torch.device("cuda", 0), Path(folder))
    cores = [os.sched_getaffinity(int(number)) for number in os.listdir("/proc/self/task")]
    again = stay_near(torch.device("cuda", 0), Path(folder))
    done.set()
    thread.join()
    return [near, all(one == near for one in cores), len(cores) > 1, torch.get_num_threads(), again]


@pytest.mark.skipif(sys.platform != "linux", reason="binds threads")
def test_a_rank_is_bound_with_all_its_threads(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one core")
    core, *others = sorted(allowed)
    rest = ",".join(map(str, others))
    folder = _machine(tmp_path, f"{core},{rest}", [rest, str(core)], 1)
    assert run_ranks(_bound, 1, str(folder), init=False) == [[{core}, True, True, 1, set()]]


def test_a_run_binds_its_ranks_once_the_data_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing uses all cores of the node; memory that a rank allocates from then on is near its GPU."""
    order: list[str] = []
    monkeypatch.setattr(build.log, "set_up", lambda rank, folder: None)
    monkeypatch.setattr(build, "open_data", lambda *_: order.append("data") or (None, None))
    monkeypatch.setattr(build, "identify_tokenizer", lambda *_: ({}, {}))
    monkeypatch.setattr(build, "stay_near", lambda device: order.append(f"near {device}"))
    monkeypatch.setattr(build, "wire", Mock(side_effect=InterruptedError))
    job = load_job(None, ["--run.dir", str(tmp_path)], 1)
    rank = process.Rank(0, 1, 0, torch.device("cuda", 3))
    with pytest.raises(InterruptedError):
        build.build(job, rank)
    assert order == ["data", "near cuda:3"]


def test_a_thread_works_on_the_device_of_the_thread_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    thread = Thread(target=on_this_device(told.append), args=("at work",))
    assert told == []
    thread.start()
    thread.join()
    assert told == [3, "at work"]


def test_a_process_without_a_gpu_initializes_none() -> None:
    told: list[int] = []
    assert on_this_device(told.append) == told.append
