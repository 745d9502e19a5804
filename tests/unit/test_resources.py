"""What a process takes of its machine, `titan.resources`, and that ranks and launchers do."""

import resource
from collections.abc import Callable

import pytest

from tests.ranks import run_ranks
from titan.errors import EXIT_DONE
from titan.ranks import launcher, process
from titan.ranks.launch_env import LaunchEnv
from titan.ranks.rank_processes import RankProcesses
from titan.resources import DESCRIPTORS, raise_descriptor_limit

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
