"""What holds for every test: one thread, a limit that shows all stacks, the markers, and built-in plugins alone.

Tests run on the CPU, on a GPU node too; those marked `gpu` run with `-m gpu`, which runs no others. Those marked
`sweep` run with an `-m` that names the mark: `make sweep`.
"""

import faulthandler
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from titan.contracts.plugin import registry

LIMIT = 300.0
LIMIT_SLOW = 900.0
"""Seconds a test may take before every thread's stack is printed and the session ends; ranks end with it."""

torch.set_num_threads(1)

for _logger in logging.root.manager.loggerDict.values():
    if isinstance(_logger, logging.Logger):
        _logger.propagate = True  # or pytest adds its handlers to torch's 54 loggers, each, three times a test: 4 ms

_terminal = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and keep the real stderr: the one a test sees is captured, and lost at a hard end."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs with -m gpu alone")
    config.addinivalue_line("markers", f"slow: may take minutes, up to {LIMIT_SLOW:g} s; leave out with -m 'not slow'")
    config.addinivalue_line(
        "markers", "sweep: one more case of what another test shows, or a dear one; runs with -m sweep"
    )
    config.stash[_terminal] = os.dup(2)
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for the ranks and commands that tests start


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give back what `pytest_configure` took."""
    os.close(config.stash[_terminal])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave sweeps out unless -m speaks of them; skip tests marked `gpu` where there is none."""
    sweeps = [item for item in items if item.get_closest_marker("sweep")]
    if sweeps and "sweep" not in config.option.markexpr:
        config.hook.pytest_deselected(items=sweeps)
        items[:] = [item for item in items if item not in sweeps]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device, or not run with -m gpu"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limit the test with its fixtures. The timer is a C thread: it fires inside a hung native call too."""
    limit = LIMIT_SLOW if item.get_closest_marker("slow") else LIMIT
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[_terminal])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _collections_pass_over_what_is_imported() -> None:
    """Dry runs collect garbage, and going through all that pytest and torch hold takes longer than a small one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _builtin_plugins() -> None:
    """Loaded once: each time, all are held against each other."""
    registry.load_plugins()


@pytest.fixture(autouse=True)
def _plugins_of_a_test_end_with_it(_builtin_plugins: None) -> Iterator[None]:
    """What a test loads from outside, the next one does not find: an axis more is another space of layouts."""
    plugins, opened = dict(registry.plugins), set(registry.opened)
    yield
    registry.plugins.clear()
    registry.plugins.update(plugins)
    registry.opened.clear()
    registry.opened.update(opened)


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    """The package, which then looks for nothing on the network; a test that asks for it is skipped without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        yield pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def one_rank() -> Callable[..., Any]:
    """`one_rank(*words, config=PATH)`: the outcome of a job with these words on one rank, run once a session."""
    from titan.testing.jobs import one_rank  # here: tests that train nothing need none of it

    return one_rank


@pytest.fixture
def same_curve(one_rank: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`same_curve(RANKS, WORDS, ONE, config=PATH)`: the outcome of three steps, whose curve is that of one rank.

    WORDS are those of the job, ONE those of the job on one rank: what its curve is a function of.
    """
    from tests.jobs import DECAYING, LLAMA, THREE_STEPS
    from titan.testing.jobs import assert_same_curve, train_job

    def same(ranks: int, words: Sequence[str], one: Sequence[str] = (), config: Path = LLAMA) -> Any:
        outcome = train_job(tmp_path, ranks, *THREE_STEPS, *DECAYING, *words, config=config)
        assert_same_curve(one_rank(*THREE_STEPS, *DECAYING, *one, config=config), outcome)
        return outcome

    return same
