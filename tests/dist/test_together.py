"""Work that ranks do in turns: the others wait for as long as it takes, and a failure on one ends all of them."""

import os
import threading
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.commands import free_port
from tests.jobs import LLAMA
from titan import train
from titan.errors import ConfigError, RankFailedError
from titan.ranks import turns
from titan.ranks.meeting.store import shared_store
from titan.ranks.process import Rank
from titan.testing.jobs import write_text
from titan.testing.ranks import RankError, run_ranks

TIMEOUT_S = 0.5
"""Of a collective."""


def me() -> Rank:
    return Rank(dist.get_rank(), dist.get_world_size(), dist.get_rank() % 2, torch.device("cpu"))


def slowly() -> list[int]:
    """Rank 0 works for three times the timeout of a collective, then the others find what it has made."""
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=TIMEOUT_S))
    turns.BEAT_S = TIMEOUT_S / 5
    made = shared_store()

    def work() -> int:
        if dist.get_rank() == 0:
            threading.Event().wait(3 * TIMEOUT_S)
        return made.add("turns", 1)

    return [turns.together(work, me(), 60.0), made.add("turns", 0)]


def test_others_wait_for_longer_than_a_collective_may_take() -> None:
    found = run_ranks(slowly, 4)
    assert found[0][0] == 1 and found[2][0] == 2 and {found[1][0], found[3][0]} == {3, 4}
    assert all(turns >= 2 for _, turns in found)


def sending() -> tuple[list[str], int]:
    """What rank 0 has made arrives on all, and no other rank makes anything."""
    made = shared_store()

    def work() -> list[str]:
        return [f"made by rank {dist.get_rank()}", str(made.add("made", 1))]

    return turns.from_first(work, me()), made.add("made", 0)


def test_what_rank_0_makes_is_sent_to_all() -> None:
    assert run_ranks(sending, 4) == [(["made by rank 0", "1"], 1)] * 4


class _TwoWords(ConfigError):
    """Cannot be read again where it is sent: its arguments are not those that it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def raising(rank: int, kind: type[Exception], *words: str) -> tuple[str, str]:
    def work() -> None:
        if dist.get_rank() == rank:
            raise kind(*words)

    try:
        turns.together(work, me(), 60.0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("rank", [0, 3])
def test_an_error_of_one_is_the_error_of_all(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(raising, 4, rank, ConfigError, "no such text", timeout=20) == [("ConfigError", "no such text")] * 4
    assert "Traceback" not in capfd.readouterr().out
    failed = ("RankFailedError", f"rank {rank} failed: KeyError: 'planted'")
    assert run_ranks(raising, 4, rank, KeyError, "planted", timeout=20) == [failed] * 4


def test_an_error_that_cannot_be_sent_keeps_its_words() -> None:
    assert run_ranks(raising, 2, 1, _TwoWords, "no such", "text", timeout=20) == [("ConfigError", "no such text")] * 2


def leaving() -> str:
    """Rank 0 is gone before its turn."""
    turns.BEAT_S, turns.LOST_S = 0.05, 0.2
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(RankFailedError) as told:
        turns.together(lambda: None, me(), 60.0)
    return str(told.value)


def test_one_that_is_gone_is_missed() -> None:
    assert run_ranks(leaving, 2)[1] == "no rank that prepares data has responded for 0.2 s"


def sticking() -> None:
    """Rank 1, whose turn is the last, waits for nobody."""
    turns.together(lambda: threading.Event().wait() if dist.get_rank() == 1 else None, me(), 0.3)


@pytest.mark.sweep
def test_one_that_is_stuck_in_the_last_turn_ends_with_its_stacks() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 ended with exit code 1") as told:
        run_ranks(sticking, 2, timeout=30)
    said = str(told.value)
    assert "opening what other ranks have prepared took longer than 0.3 s (comm.init_timeout_s)" in said
    assert "in sticking" in said or "threading.py" in said


def hearing_late(port: int) -> str:
    """Rank 0 serves the store, and the others look at it a second after it has heard of the error itself."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    sleep, late = time.sleep, float(dist.get_rank() != 0)
    turns.time.sleep = lambda seconds: sleep(seconds + late)  # type: ignore[attr-defined]
    return raising(0, ConfigError, "no such text")[1]


def test_rank_0_stays_until_all_have_heard() -> None:
    assert run_ranks(hearing_late, 4, free_port(), init=False, timeout=60) == ["no such text"] * 4


class Looked(dist.HashStore):
    """A store that notes when it is looked at, by a clock of its own; all is done after 1,000 s."""

    now, looks = 0.0, ()

    def check(self, keys: list[str]) -> bool:
        self.looks = (*self.looks, self.now)
        return self.now > 1000

    def add(self, key: str, number: int) -> int:
        return int(self.now)


def test_two_thousand_ranks_leave_the_store_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ranks_ = Looked(), 2048
    monkeypatch.setattr(turns, "shared_store", lambda: store)
    monkeypatch.setattr(turns, "PrefixStore", lambda prefix, inner: inner)
    monkeypatch.setattr(time, "monotonic", lambda: store.now)
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(store, "now", store.now + seconds))
    turns._Turn(Rank(1, ranks_, 1, torch.device("cpu")))._wait()
    pauses = [later - sooner for sooner, later in pairwise(store.looks)]
    assert ranks_ / min(pauses) <= 5000
    assert ranks_ / pauses[-1] < 210 and len(pauses) < 160
    assert store.now < 1011


BROKEN = '''
"""A dataset that breaks on the rank that is asked for its files."""

from dataclasses import dataclass

from titan.contracts import Dataset, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Broken(Dataset):
    """Breaks."""

    name = "broken"
    Config = Config

    def files(self):
        return {}["planted"]
'''


def test_a_run_ends_on_all_ranks_with_the_error_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "broken.py").write_text(BROKEN)
    write_text(tmp_path / "text")
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{LLAMA}"\n[plugins]\npath = ["plugins"]\n[mesh]\ndp_shard = 2\n[data]\nname = "broken"\n')
    words = ["--config", str(job), "--run.dir", str(tmp_path), "--data.cache", str(tmp_path / "cache")]
    assert run_ranks(train.main, 2, words, init=False, timeout=60) == [1, 1]
    said = capfd.readouterr().out
    assert said.count("Traceback") == 1 and "--- rank 1" not in said, said
    assert said.index("KeyError: 'planted'\n") < said.index("error: rank 0 failed: KeyError: 'planted'")
