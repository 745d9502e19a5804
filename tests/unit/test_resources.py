"""What a process takes of its machine, `titan.resources`, and that ranks and launchers do."""

import os
import resource
from collections.abc import Callable

import pytest
import torch

from tests.ranks import run_ranks
from titan.errors import EXIT_DONE
from titan.ranks import launcher, process
from titan.ranks.launch_env import LaunchEnv
from titan.ranks.rank_processes import RankProcesses
from titan.resources import ALLOCATOR, DESCRIPTORS, let_segments_expand, raise_descriptor_limit

Limits = tuple[int, int]


def _limit() -> Limits:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _raised(before: Limits, act: Callable[[], None]) -> Limits:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    act()
    return _limit()


def _enter() -> None:
    process.enter(process.here("cpu"), timeout_s=60.0)


def _launch() -> None:
    RankProcesses.lead = lambda self: []  # type: ignore[method-assign]
    launcher.start(lambda argv: EXIT_DONE, [], LaunchEnv(1, 0, 1, "127.0.0.1", 0))


@pytest.mark.parametrize("act", [raise_descriptor_limit, _enter, _launch])
def test_the_soft_limit_of_descriptors_becomes_the_hard_one(act: Callable[[], None]) -> None:
    assert run_ranks(_raised, 1, (256, 4000), act, init=False) == [(4000, 4000)]


def test_a_limit_that_is_higher_or_refused_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Limits] = []

    def refuse(_: int, limits: Limits) -> None:
        asked.append(limits)
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    for limits in ((2 * DESCRIPTORS, resource.RLIM_INFINITY), (4000, 4000), (resource.RLIM_INFINITY,) * 2):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        raise_descriptor_limit()
    assert not asked
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    raise_descriptor_limit()
    assert asked == [(DESCRIPTORS, resource.RLIM_INFINITY)]


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
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    let_segments_expand()
    assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == found


def test_a_rank_on_a_gpu_sets_the_allocator_before_it_touches_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(process, "_device", lambda wanted, local: torch.device("cuda", 0))
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
