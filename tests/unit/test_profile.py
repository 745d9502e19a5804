"""Where a step went: arithmetic of intervals, and what is read from traces of a GPU and of a CPU, made by hand."""

import errno
import gzip
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.jobs import LLAMA
from titan.config import load_job
from titan.contracts import Axis
from titan.contracts.base.cost import PredictedStep
from titan.contracts.base.layout import Layout
from titan.errors import ConfigError
from titan.planner.machine import cluster
from titan.plugins.observe import profile
from titan.plugins.observe.profile import Config, Profile, recorder
from titan.plugins.observe.profile.intervals import divided, first_come, inside, minus, total, union
from titan.plugins.observe.profile.table import by_row, text
from titan.plugins.observe.profile.trace import OVER, axis_of_batches, seconds_per_step

AXES = (
    Axis(name="pp", data="same", weights="layers", topology_order=0, doc="stages"),
    Axis(name="dp_replicate", data="dealt", weights="copies", topology_order=10, doc="replicas"),
    Axis(name="dp_shard", data="dealt", weights="copies", topology_order=20, doc="shards"),
    Axis(name="tp", data="same", weights="slices", topology_order=40, doc="slices"),
)


def test_against_counting_instants_one_by_one() -> None:
    draw = Random(0)

    def some() -> list[tuple[float, float]]:
        begins = [draw.randrange(40) for _ in range(draw.randrange(7))]
        return [(begin, begin + draw.randrange(9)) for begin in begins]

    def instants(spans: Any) -> set[int]:
        return {instant for begin, end in spans for instant in range(int(begin), int(end))}

    for _ in range(300):
        one, other, third = some(), some(), some()
        a, b, c = map(instants, (one, other, third))
        for found, expected in ((union(one), a), (minus(one, other), a - b), (inside(one, other), a & b)):
            assert instants(found) == expected and all(begin < end for begin, end in found)
            assert all(before[1] < after[0] for before, after in pairwise(found))
        assert total(one) == len(a)
        window = instants([(5, 35)])
        found = divided((5, 35), [{"a": one, "b": other}, {"a": third}])
        wanted = {"a": len((a | c - b) & window), "b": len((b - a) & window), "other": len(window - a - b - c)}
        assert found == wanted


def test_of_two_at_once_the_first_to_begin_counts() -> None:
    sent = [(0, 4, "tp"), (2, 6, "dp"), (3, 5, "tp"), (5.5, 8, "tp")]
    assert first_come(sent) == {"tp": [(0, 4), (6, 8)], "dp": [(4, 6)]}


def event(name: str, cat: str, begin: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "pid": 1, "tid": tid, "args": args}


def kernel(name: str, begin: float, end: float, stream: int, launched: float, **args: Any) -> list[dict[str, Any]]:
    """A kernel, and its launch by the host."""
    own = {"correlation": int(launched * 10)}
    launch = event("cudaLaunchKernel", "cuda_runtime", launched, launched + 1, **own)
    return [event(name, "kernel", begin, end, tid=stream, stream=stream, **own, **args), launch]


def sent(kind: str, group: str, begin: float, end: float, stream: int, launched: float) -> list[dict[str, Any]]:
    names = {"Collective name": kind, "Process Group Name": group, "Process Group Description": "mesh_x"}
    return kernel(
        f"ncclDevKernel_{kind}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        begin,
        end,
        stream,
        launched,
        **names,
    )


GPU = [
    event("ProfilerStep#7", "user_annotation", 100, 150),
    event("ProfilerStep#8", "user_annotation", 150, 200),
    event("titan: data", "user_annotation", 100, 112),
    event("titan: optimizer", "user_annotation", 160, 170),
    # As the host's events, annotations of the device would count twice.
    event("ProfilerStep#7", "gpu_user_annotation", 103, 160, tid=7),
    *kernel("gemm", 104, 120, 7, 101),
    *kernel("void at::native::elementwise", 110, 124, 9, 102),  # on another stream: one instant counts once
    *sent("AllGather", "1", 116, 130, 20, 103),  # 8 covered by kernels of two streams, 6 exposed
    *sent("AllReduce", "2", 128, 140, 24, 104),  # 2 behind the all-gather that began first, 4 covered by the next
    *kernel("gemm", 132, 136, 7, 105),
    *sent("SendRecv", "9", 146, 148, 30, 106),  # of a group that no axis has
    *kernel("multi_tensor_apply_kernel", 172, 190, 7, 165),  # launched by the optimizer, begun after its annotation
    *sent("ReduceScatter", "1", 185, 195, 20, 166),
    event("Memcpy HtoD", "gpu_memcpy", 196, 199, tid=33, correlation=3),
    {"ph": "M", "name": "process_name", "args": {}},
]


def microseconds(events: list[dict[str, Any]], steps: int, *more: Any) -> dict[str, float]:
    """Of all these steps."""
    found = seconds_per_step({"traceEvents": events}, steps, *more)
    return {name: round(value * steps * 1e6, 6) for name, value in found.items()}


def test_a_trace_of_a_gpu() -> None:
    assert microseconds(GPU, 2, {"1": "dp_shard", "2": "tp"}) == {
        "update": 18,
        "compute": 24,
        "dp_shard": 6 + 5,
        "tp": 2 + 4,
        "": 2,
        "data": 4,
        "other": 100 - 65,
    }
    last = microseconds(GPU, 1, {"1": "dp_shard", "2": "tp"})
    assert sum(last.values()) == 50 and last["update"] == 0


def test_a_batch_of_sends_names_no_group() -> None:
    """It belongs to the axis given for it; one that names its group, and other kernels, do not."""
    trace = [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        *kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 10, 40, 20, 1),
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 40, 45, 21, 2),
        *sent("SendRecv", "3", 50, 57, 22, 3),
        *sent("SendRecv", "9", 60, 61, 22, 4),  # of a group that no axis has
    ]
    found = microseconds(trace, 1, {"3": "cp"}, "pp")
    assert {name: value for name, value in found.items() if value} == {"pp": 30, "": 5 + 1, "cp": 7, "other": 100 - 43}


@pytest.mark.parametrize(
    ("degrees", "axis"),
    [
        ({"stages": 2, "apart": 2, "copies": 2}, "stages"),
        ({"stages": 1, "apart": 2, "copies": 2}, "apart"),
        ({"stages": 1, "apart": 1, "copies": 2}, ""),
    ],
)
def test_the_axis_of_a_batch_is_found_by_facts(degrees: dict[str, int], axis: str) -> None:
    axes = (
        Axis(name="apart", data="dealt", weights="own", topology_order=-10, doc="weights of their own"),
        Axis(name="stages", data="same", weights="layers", topology_order=0, doc="other layers"),
        Axis(name="copies", data="dealt", weights="copies", topology_order=10, doc="copies"),
    )
    assert axis_of_batches(Layout(axes, degrees)) == axis


def call(axes: str, begin: float) -> list[dict[str, Any]]:
    return [event(f"{OVER}{axes}", "user_annotation", begin, begin + 1), event("c10d::x", "cpu_op", begin, begin + 0.8)]


CPU = [
    event("ProfilerStep#5", "user_annotation", 0, 100),
    event("titan: data", "user_annotation", 2, 10),
    event("aten::stack", "cpu_op", 3, 9),  # the loader's own
    event("titan: forward and backward", "user_annotation", 10, 70),
    event("aten::linear", "cpu_op", 12, 30),
    event("aten::mm", "cpu_op", 14, 28),
    *call("tp", 30),
    event("gloo:all_reduce", "user_annotation", 30.5, 44, tid=8),
    event("aten::copy_", "cpu_op", 31, 40, tid=8),  # gloo's own work is no computation
    event("MulBackward0", "cpu_op", 32, 50),  # the wait inside of it is none either
    event("_c10d_functional::wait_tensor", "cpu_op", 34, 44),
    *call("dp_shard", 50),
    event("gloo:all_gather", "user_annotation", 51.5, 60, tid=9),
    event("aten::mm", "cpu_op", 53, 58),
    *call("tp", 60),
    *call("dp_shard", 61.5),
    # Begins late, after a call for the other group: the thread's own group counts.
    event("gloo:all_reduce", "user_annotation", 62, 66, tid=8),
    *call("tp", 67),
    event("gloo:all_reduce", "user_annotation", 67.5, 70, tid=8),
    *call("pp", 70.5),
    event("gloo:recv", "user_annotation", 71, 76, tid=1),  # by the thread that calls it, beside what it computes
    event("titan: optimizer", "user_annotation", 80, 95),
    event("aten::_fused_adamw_", "cpu_op", 82, 90),
]


def test_a_trace_of_a_cpu() -> None:
    assert microseconds(CPU, 1, {"1": "unused"}) == dict(
        data=8, update=15, compute=18 + 2 + 6 + 5, tp=1.5 + 10 + 4 + 2.5, dp_shard=1.5 + 2, pp=5, other=100 - 80.5
    )


@pytest.mark.parametrize("events", [GPU, CPU, [entry for entry in CPU if "Profiler" not in entry["name"]]])
def test_steps_that_the_profiler_dropped(events: list[dict[str, Any]]) -> None:
    with pytest.raises(LookupError, match=r"the trace has [012] of the 3 steps that were recorded"):
        seconds_per_step({"traceEvents": events}, 3, {})


MEASURED = {"update": 0.01, "compute": 0.05, "dp_shard": 0.01, "dp_replicate": 0.005}
MEASURED |= {"tp": 0.02, "": 0.001, "data": 0.002, "other": 0.002}


def test_groups_of_axes_are_the_rows_of_a_prediction() -> None:
    assert by_row(MEASURED | {"dp_shard x tp": 0.5}, AXES) == dict(
        compute=0.05, tp=0.02, dp=pytest.approx(0.515), all_ranks=0.001, optimizer=0.01, data=0.002, other=0.002
    )


def test_the_table_beside_a_prediction() -> None:
    time_s = {"forward": 0.02, "backward": 0.03, "recompute": 0.01, "tp": 0.01, "dp": 0.02, "pp": 0.0, "bubble": 0.005}
    predicted = PredictedStep(cluster="x", time_s={**time_s, "optimizer": 0.005})
    assert text(MEASURED, AXES, predicted).splitlines() == [
        "                                   measured, s  share  predicted, s  share",
        "compute                                 0.0500  50.0%        0.0600  60.0%",
        "tensor-parallel communication           0.0200  20.0%        0.0100  10.0%",
        "data-parallel communication             0.0150  15.0%        0.0200  20.0%",
        "  dp_shard                              0.0100  10.0%",
        "  dp_replicate                          0.0050   5.0%",
        "pipeline communication and bubble       0.0000   0.0%        0.0050   5.0%",
        "collectives of all ranks                0.0010   1.0%        0.0000   0.0%",
        "optimizer update                        0.0100  10.0%        0.0050   5.0%",
        "waiting for data                        0.0020   2.0%        0.0000   0.0%",
        "other: host, copies, idle               0.0020   2.0%        0.0000   0.0%",
        "step                                    0.1000               0.1000",
    ]
    assert text(MEASURED, AXES, None).splitlines()[1] == "compute                             0.0500  50.0%"


def test_every_row_is_a_key_of_metrics() -> None:
    measured = {**MEASURED, "pp": 1.0, "cp": 1.0, "ep": 1.0, "worker": 1.0}
    assert {f"profile_{row}_s" for row in by_row(measured, AXES)} <= set(Profile.measures)


NAME = "rank-0_steps-1-2"


def profiler(done: list[str], trace: str, fails: dict[str, Exception]) -> SimpleNamespace:
    """In place of torch's: writes a trace made by hand. fails: what it does -> what that raises."""

    def does(what: str, path: str = os.devnull) -> None:
        done.append(what)
        if what in fails:
            raise fails[what]
        Path(path).write_text(trace)

    methods = {f"{what}_trace": partial(does, what) for what in ("prepare", "start", "stop")}
    return SimpleNamespace(**methods, export_chrome_trace=partial(does, "export"))


Recording = Callable[..., tuple[Profile, list[str]]]
TRACE = json.dumps({"traceEvents": CPU + GPU[1:2]})


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Recording:
    """Makes a technique that records two steps of a rank, 1 and 2, and a list of what it does to the process."""
    caplog.set_level(logging.INFO, "titan")

    def made(device: str = "cpu", trace: str = TRACE, from_step: int = 1, **fails: Exception) -> Any:
        done: list[str] = []
        memory = SimpleNamespace(
            _record_memory_history=lambda enabled="all", **_: done.append(f"history {enabled}"),
            _dump_snapshot=lambda path: Path(path).touch(),
        )
        monkeypatch.setattr(recorder, "profile", lambda: profiler(done, trace, fails))
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(memory=memory))
        monkeypatch.setattr(recorder, "around_each", lambda around: lambda: done.append("deaf"))
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: done.append("synchronize"))
        layout, group = Layout(AXES, {axis.name: 1 for axis in AXES}), SimpleNamespace(group_name="1")
        where: Any = torch.device(device)
        mesh = SimpleNamespace(layout=layout, device=where, rank=0, groups=lambda: [("tp", group)])
        job = SimpleNamespace(folder=tmp_path, train=SimpleNamespace(steps=9))
        technique: Any = Profile(Config(from_step=from_step, steps=2))
        technique.apply(None, SimpleNamespace(mesh=mesh, job=job, device=where, predict=lambda name: None))
        technique.load_state_dict({})
        return technique, done

    return made


def run(technique: Profile, steps: int = 2) -> None:
    for step in range(1, steps + 1):
        technique.before_step(step)
        technique.after_step(step, torch.tensor(True))
    technique.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_recording(recording: Recording, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    technique, done = recording()
    run(technique)
    assert done == ["prepare", "history all", "start", "stop", "export", "deaf", "history None"]
    assert warnings(caplog) == [] and "seconds per step, rank 0, steps 1-2" in caplog.text
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == [
        f"{NAME}.memory.pickle",
        f"{NAME}.pt.trace.json.gz",
    ]
    assert technique.measure()["profile_step_s"] is not None


FULL = OSError(errno.ENOSPC, "No space left on device")
LOST = json.dumps({"traceEvents": CPU})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"export": FULL}, "OSError: [Errno 28] No space left on device"),
        ({"export": RuntimeError("Trace is already saved.")}, "RuntimeError: Trace is already saved."),
        ({"stop": RuntimeError("an error of the device")}, "RuntimeError: an error of the device"),
        ({"stop": MemoryError()}, "MemoryError: "),
        ({"trace": ""}, "OSError: torch's profiler wrote no trace to "),
        ({"trace": LOST[:-9]}, "JSONDecodeError: "),
        ({"trace": LOST}, "LookupError: the trace has 1 of the 2 steps that were recorded"),
        ({"trace": LOST.replace('"dur"', '"d"')}, "KeyError: 'dur'"),
    ],
    ids=["full disk", "export", "stop", "memory", "empty", "cut short", "dropped steps", "dropped fields"],
)
def test_a_recording_that_fails_ends_no_run(
    given: dict[str, Any], said: str, recording: Recording, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One warning with the files and the reason; the process records nothing any more."""
    technique, done = recording(**given)
    run(technique)
    assert done[-2:] == ["deaf", "history None"] and done.count("stop") == 1
    files = f"[plugins.profile] cannot write or read {tmp_path / 'profile' / NAME}.*: {said}"
    assert len(warnings(caplog)) == 1 and warnings(caplog)[0].startswith(files), caplog.text
    assert not any(value is not None for value in technique.measure().values())


@pytest.mark.parametrize("what", ["prepare", "start"])
def test_a_profiler_that_does_not_start_ends_no_run(what: str, recording: Recording, caplog: Any) -> None:
    technique, done = recording(from_step=3, **{what: RuntimeError("another profiler runs")})
    run(technique, steps=4)
    assert done.count("history all") == done.count("history None") and "export" not in done
    assert warnings(caplog) == [
        "[plugins.profile] cannot start the profiler: RuntimeError: another profiler runs; the run goes on without a "
        "table"
    ]


@pytest.mark.parametrize(("device", "written"), [("cpu", True), ("cuda", False)])
def test_an_error_of_the_run_in_the_window(
    device: str, written: bool, recording: Recording, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing waits for a device then, as torch's profiler does when it stops: its stream may wait for a lost rank."""
    technique, done = recording(device)
    technique.before_step(1)
    technique.after_step(1, torch.tensor(True))
    before = len(done)
    try:
        raise RuntimeError("another rank is gone")
    except RuntimeError:
        technique.close()
    after = ["stop", "export", "deaf", "history None"] if written else ["history None"]
    assert done[before:] == after and (tmp_path / "profile").exists() == written
    assert ("rank-0_steps-1-1.* are not written: the run failed" in caplog.text) == (not written)
    assert "seconds per step" not in caplog.text and warnings(caplog) == []


@pytest.mark.parametrize(("bytes_", "large"), [(2_000_000, False), (2_000_001, True)])
def test_a_large_trace_is_not_read(
    bytes_: int, large: bool, recording: Recording, monkeypatch: pytest.MonkeyPatch, caplog: Any, tmp_path: Path
) -> None:
    """The size of a trace is that of its JSON, which is compressed."""
    monkeypatch.setattr(profile, "MOST_BYTES", 2_000_000)
    run(recording(trace=TRACE.ljust(bytes_))[0])
    trace = tmp_path / "profile" / f"{NAME}.pt.trace.json.gz"
    assert gzip.decompress(trace.read_bytes()).decode() == TRACE.ljust(bytes_)
    assert ("seconds per step" in caplog.text) == (not large)
    said = f"{trace} is written, but has no table: its JSON has 2 MB, at most 2 MB are read; set steps lower"
    assert warnings(caplog) == large * [f"[plugins.profile] {said}"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("from_step", "0"), "from_step = 0: must be at least 1"),
        (("steps", "0"), "steps = 0: must be at least 1"),
        (("ranks", "0,4"), "ranks has [4], and the layout has ranks 0 to 3; leave them out, or set ranks ="),
        (("ranks", "[]"), "ranks is empty; name some of ranks 0 to 3"),
        (("ranks", "some"), "ranks = some: must be one of 'auto', 'all', or must be an integer"),
    ],
)
def test_what_is_refused(words: tuple[str, str], said: str, tmp_path: Path) -> None:
    given = ["--data.path", str(tmp_path), "--mesh.tp", "2", "--mesh.dp_shard", "2"]
    with pytest.raises(ConfigError) as refused:
        load_job(LLAMA, [*given, f"--plugins.profile.{words[0]}", words[1]], 4)
    assert "[plugins.profile]" in str(refused.value) and said in str(refused.value)


@pytest.mark.parametrize(
    ("device", "memory_gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA H100 NVL", 93.1, ""),
        ("cpu", 0.0, ""),
    ],
)
def test_the_cluster_of_a_device(device: str, memory_gib: float, name: str) -> None:
    assert cluster.of_device(device, memory_gib) == name
