"""Which backends of attention a job can use, and which is the best: rules of device, dtype and model."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch

from titan.contracts import Job, ModelSpec, kind_of
from titan.contracts.base.cost import Attention

Name = Literal["sdpa", "math", "efficient", "flash", "cudnn", "varlen", "flex", "documents", "cpu"]


class Backend(NamedTuple):
    """device: "cpu", "cuda", or "" for both.  dtypes: empty: all.  follows: what it does besides causal attention.

    heads: (multiple, least, most) of the features of a head.  masked: whether it is given a mask of S x S.
    """

    device: str = ""
    dtypes: tuple[torch.dtype, ...] = ()
    follows: tuple[str, ...] = ()
    heads: tuple[int, int, int] = (1, 1, 1 << 30)
    masked: bool = True


_HALF = (torch.bfloat16, torch.float16)
_PACKED = ("documents", "window")
_ALL = (*_PACKED, "ALiBi slopes", "a soft cap")
_FLASH = (8, 8, 256)
BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(follows=_ALL),
    "math": Backend(follows=_ALL),
    "efficient": Backend("cuda", follows=_ALL[:3]),
    "flash": Backend("cuda", _HALF, heads=_FLASH),
    "cudnn": Backend("cuda", _HALF, heads=_FLASH),
    "varlen": Backend("cuda", _HALF, _PACKED, _FLASH, masked=False),
    "flex": Backend("cuda", follows=_ALL, heads=(1, 16, 256), masked=False),
    "documents": Backend("cpu", follows=_PACKED, masked=False),
    "cpu": Backend("cpu", (torch.bfloat16, torch.float32), _PACKED, (16, 16, 256), masked=False),
}
_DEVICES = {"cpu": "CPUs", "cuda": "GPUs"}


class Setting(NamedTuple):
    """What decides which backends can be used.

    device: "cpu" or "cuda"; "" where it is not known yet.  here: it is the device of this process, which can be asked.
    has: what attention does besides causal attention, in words.
    head_dim: features of a head.  written: the model writes its scores by an option of its own.  sliced: mesh axes that
    slice sequences.
    """

    device: str
    here: bool
    dtype: torch.dtype
    head_dim: int
    has: tuple[str, ...]
    written: bool
    sliced: tuple[str, ...]
    deterministic: bool


def setting_of(job: Job, spec: ModelSpec, device: torch.device | None = None) -> Setting:
    """What a job says of its attention; device: of this rank, None where there is none yet.

    Where neither the job nor a device says what the job runs on, it is planned for a GPU.
    """
    here = device is not None and kind_of(device) == device.type
    kind = job.run.device if job.run.device != "auto" else device.type if here and device is not None else ""
    cores = [op for op in spec.layer_ops if isinstance(op, Attention)]
    length = job.data.seq_len
    there = {
        "documents": job.data.packing == "document_mask",
        "window": any(op.keys(length) < length for op in cores),
        "ALiBi slopes": any(op.biased for op in cores),
        "a soft cap": any(op.soft_cap for op in cores),
    }
    return Setting(
        kind,
        here,
        job.precision.param_dtype,
        spec.head_dim,
        tuple(word for word in _ALL if there[word]),
        any(op.scores_written and not op.soft_cap for op in cores),
        tuple(axis for axis in job.layout.axes_of("sliced") if job.layout.degree(axis) > 1),
        job.run.deterministic,
    )


def unfit(backend: str, setting: Setting) -> Iterator[str]:
    """Why a backend cannot be used: a sentence each."""
    needs, asked = BACKENDS[backend], f'backend = "{backend}"'
    if needs.device and setting.device not in ("", needs.device):
        there = _DEVICES[setting.device]
        yield f'{asked} is for {_DEVICES[needs.device]}, and the run is on {there}; set backend = "auto"'
    if needs.dtypes and setting.dtype not in needs.dtypes:
        names, dtype = (" or ".join(map(_name, needs.dtypes)), _name(setting.dtype))
        yield f'{asked} computes in {names}, and the run in {dtype}; add [plugins.bf16], or set backend = "auto"'
    if why := _no_heads(backend, setting):
        yield f'{asked} {why}; set backend = "auto"'
    if left_out := [word for word in setting.has if word not in needs.follows]:
        yield f'{asked} does not follow {" and ".join(left_out)}, which the job has; set backend = "auto"'
    if setting.written and backend not in ("sdpa", "math"):
        yield f'{asked} writes no scores, and model.attention = "unfused" does; set model.attention to its default'
    if backend == "cudnn" and setting.deterministic:
        yield f'{asked} is not deterministic, and [run] deterministic = true; set backend = "auto"'
    if backend == "cpu" and setting.here and setting.device == "cpu" and (why := _no_kernel(setting)):
        yield f'{asked} cannot be used: {why}; set backend = "auto"'


def _no_heads(backend: str, setting: Setting) -> str:
    """Why the heads of a model are none for a backend; empty: they are."""
    multiple, least, most = BACKENDS[backend].heads
    if setting.head_dim % multiple == 0 and least <= setting.head_dim <= most:
        return ""
    steps = f" in steps of {multiple}" if multiple > 1 else ""
    return f"needs heads of {least} to {most} features{steps}, and the model has {setting.head_dim}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kept_by(setting: Setting) -> str:
    """Why "auto" leaves attention alone; empty: it need not."""
    if setting.sliced:
        return f"as mesh.{setting.sliced[0]} has an operation of its own"
    return "as model.attention says that scores are written" if setting.written else ""


def best(setting: Setting) -> tuple[Name, str]:
    """(backend, why) of "auto". Where the device is not known, as on a GPU."""
    if kept := kept_by(setting):
        return "sdpa", kept
    special = " and ".join(setting.has)
    if setting.device == "cpu":
        plain = setting._replace(here=False)
        why = ""
        if not any(unfit("cpu", plain)):
            why = (_no_kernel(setting) or own_kernel().outdone(setting.dtype)) if setting.here else ""
            if not why:
                return "cpu", f"the fastest in {_name(setting.dtype)} on this CPU"
        elif not any(unfit("cpu", plain._replace(head_dim=BACKENDS["cpu"].heads[0]))):
            why = f"it {_no_heads('cpu', setting)}"
        lacking = f"; titan's own kernel is not used: {why}" if why else ""
        if "documents" in setting.has and not any(unfit("documents", setting)):
            return "documents", f"for {special} without a mask{lacking}"
        plain = f"the only one on CPUs for {special}" if special else "PyTorch's own choice for plain attention"
        return "sdpa", plain + lacking
    if not special:
        return "sdpa", "PyTorch's own choice for plain attention"
    for name in ("varlen", "flex"):
        if not any(unfit(name, setting)):
            return name, f"for {special} without a mask"  # type: ignore[return-value]
    return "sdpa", f"the only one for {special} with heads of {setting.head_dim} features"


def own_kernel() -> Any:
    """The module of titan's kernel for CPUs, which registers its operations when it is imported."""
    return import_module("..cpu_kernel", __package__)


def _no_kernel(setting: Setting) -> str:
    """Why titan's kernel cannot be used on this CPU. It is compiled when it is first asked for."""
    why: str = own_kernel().why_not(torch.device("cpu"), setting.dtype, setting.head_dim)
    return why
