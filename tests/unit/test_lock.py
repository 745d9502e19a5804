"""The lock of a run's folder: one holder at a time, judged right on this machine and on another one."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.checkpoints import names_in, raising
from titan.errors import EXIT_WRONG_INPUT, FolderError
from titan.ranks import folder_lock as locks
from titan.ranks.folder_lock import FolderLock

Slept = list[Callable[[], Any]]

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> Slept:
    """What happens at each look of a watch, which takes no time here; then nothing does. Hearts are still."""
    happening: Slept = []

    def sleep(seconds: float) -> None:
        assert seconds == locks.LOOK_S
        if happening:
            happening.pop(0)()

    monkeypatch.setattr(locks.time, "sleep", sleep)
    monkeypatch.setattr(locks, "BEAT_S", 1e6)
    return happening


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said."""
    words: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(locks.log, level, words.append)
    return words


def taken(folder: Path) -> FolderLock:
    lock = FolderLock(folder)
    lock.take()
    return lock


def elsewhere(folder: Path) -> FolderLock:
    """Taken by a process of another machine, or of another pid namespace, whose host has the name of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "readlink", lambda path: "pid:[1]")
        patch.setattr(locks.uuid, "getnode", lambda: 1)
        lock = FolderLock(folder)
    lock.take()
    return lock


def held(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "lock.json").read_text())


def content(folder: Path, /, **holder: Any) -> bytes:
    """What a process with these facts, else this one, would write as the lock of a folder that nobody holds."""
    lock = taken(folder)
    told = held(folder)
    lock.release()
    return json.dumps({**told, **holder}).encode() + b"\n"


def left_by(folder: Path, /, **holder: Any) -> None:
    """A lock whose holder has not let go of it."""
    (folder / "lock.json").write_bytes(content(folder, **holder))


def test_a_second_start_is_refused_while_the_first_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "44")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "41")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    first, second = taken(tmp_path / "run"), FolderLock(tmp_path / "run")
    there = (tmp_path / "run" / "lock.json").read_bytes()
    with pytest.raises(FolderError) as refused:
        second.take()
    holder = held(tmp_path / "run")
    assert str(refused.value) == (
        f"{tmp_path / 'run'} is in use by another run: host {holder['host']}, pid {os.getpid()}, Slurm job 41_3, "
        f"started {holder['since']}; wait for it, stop it, or give this run another --run.name"
    )
    assert refused.value.exit_code == EXIT_WRONG_INPUT
    second.check()
    second.release()
    assert (tmp_path / "run" / "lock.json").read_bytes() == there and names_in(tmp_path / "run") == ["lock.json"]
    first.release()
    assert names_in(tmp_path / "run") == []
    second.take()
    second.check()
    second.release()
    second.release()


KILLED = """
import os, signal, sys
from pathlib import Path
from titan.ranks.folder_lock import FolderLock

FolderLock(Path(sys.argv[1])).take()
os.kill(os.getpid(), signal.SIGKILL)
"""


@linux
def test_a_dead_process_is_taken_over_at_once(tmp_path: Path, told: list[str], slept: Slept) -> None:
    slept.append(lambda: pytest.fail("nobody is waited for"))
    gone = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    left = (tmp_path / "lock.json").read_bytes()
    # A zombie, and a number that was given again.
    for dead in (left, json.dumps({**json.loads(left), "pid": os.getpid(), "process": "1"}).encode()):
        (tmp_path / "lock.json").write_bytes(dead)
        lock = taken(tmp_path)
        assert names_in(tmp_path) == ["lock.json"]
        lock.check()
        lock.release()
    gone.wait()
    (tmp_path / "lock.json").write_bytes(left)
    taken(tmp_path)
    assert len(told) == 3 and told[0].startswith(f"{tmp_path / 'lock.json'} was left by host ")
    assert told[0].endswith(", which has ended; taking the lock over") and f"pid {gone.pid}" in told[0]


@linux
def test_a_process_that_cannot_be_seen_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: Slept
) -> None:
    """Where /proc shows only one's own: it has no files of another user's process."""
    left_by(tmp_path)
    read, hidden = Path.read_text, Path(f"/proc/{os.getpid()}/stat")

    def shown(path: Path, **options: Any) -> str:
        return read(tmp_path / "absent" if path == hidden else path, **options)

    monkeypatch.setattr(Path, "read_text", shown)
    slept += [lambda: None] * 45
    taken(tmp_path)
    assert slept == []


def test_one_elsewhere_that_counts_is_alive(tmp_path: Path, told: list[str], slept: Slept) -> None:
    there = elsewhere(tmp_path)
    slept += [lambda: None] * 30 + [there.check]
    with pytest.raises(FolderError, match="is in use by another run: host"):
        FolderLock(tmp_path).take()
    assert len(told) == 1 and "waiting 45 s to see whether that run is alive" in told[0]
    there.check()


@pytest.mark.parametrize("content", [None, b"", b"\x00" * 300, b'{"pid": 1', b"[]", b'{"token": 3, "pid": "x"}'])
def test_one_elsewhere_or_unknown_that_does_not_count_is_dead(
    tmp_path: Path, content: bytes | None, told: list[str], slept: Slept
) -> None:
    elsewhere(tmp_path)
    if content is not None:
        (tmp_path / "lock.json").write_bytes(content)
    slept += [lambda: None] * 45
    lock = taken(tmp_path)
    assert slept == [] and "waiting 45 s" in told[0] and "which has ended; taking the lock over" in told[1]
    lock.check()


def test_a_lock_that_is_let_go_of_while_it_is_watched_is_taken(tmp_path: Path, slept: Slept) -> None:
    slept.append(elsewhere(tmp_path).release)
    taken(tmp_path).check()


@linux
@pytest.mark.parametrize("links", [False, True])
def test_a_copy_of_a_live_run_is_free_at_once(
    links: bool, tmp_path: Path, told: list[str], slept: Slept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp -r`, and `cp -al`, whose lock is the very file of the original."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    slept.append(lambda: pytest.fail("nobody is waited for"))
    first = taken(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=os.link if links else shutil.copy2)
    holder, copy = held(tmp_path / "run"), taken(tmp_path / "copy")
    assert told == [
        f"{tmp_path / 'copy' / 'lock.json'} came with a copy of {tmp_path / 'run'}, the folder of host "
        f"{holder['host']}, pid {os.getpid()}, started {holder['since']}; taking the lock over"
    ]
    for lock in (first, copy):
        lock.check()
        assert held(lock.folder)["folder"] == str(lock.folder)
    copy.release()
    assert names_in(tmp_path / "run") == ["lock.json"] and names_in(tmp_path / "copy") == []


@linux
@pytest.mark.parametrize("kept", [False, True])
def test_a_copy_whose_original_is_not_seen_is_watched(kept: bool, tmp_path: Path, slept: Slept) -> None:
    """The named folder is gone, or another run's by now; a lock that is renewed is of a run that sees this folder."""
    left_by(tmp_path, folder=str(tmp_path / "original"))
    if kept:
        (tmp_path / "original").mkdir()
        left_by(tmp_path / "original")
    slept += [lambda: None] * 45
    taken(tmp_path)
    assert slept == []


@linux
def test_a_probe_that_another_start_sweeps_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: Slept
) -> None:
    first = taken(tmp_path / "run")
    (tmp_path / "again").symlink_to("run")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "realpath", str)  # as where it is mounted twice
        second = FolderLock(tmp_path / "again")
    monkeypatch.setattr(Path, "touch", lambda *_: None)
    slept += [lambda: None, first.check]
    with pytest.raises(FolderError, match="is in use by another run"):
        second.take()
    assert slept == []


@linux
def test_one_folder_by_two_names_is_in_use(tmp_path: Path) -> None:
    taken(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(FolderError, match="is in use by another run"):
        FolderLock(tmp_path / "again").take()
    moved = json.loads((tmp_path / "lock.json").read_text()) | {"folder": str(tmp_path / "again")}  # as mounted there
    (tmp_path / "lock.json").write_text(json.dumps(moved))
    with pytest.raises(FolderError, match="is in use by another run"):
        FolderLock(tmp_path).take()


@contextmanager
def before_read(path: Path, number: int, act: Callable[[], object]) -> Iterator[list[int]]:
    """Act once, before a lock is read for the `number`-th time; yields how often it has been read until then."""
    opened, reads = Path.open, [0]

    def counting(self: Path, *mode: Any, **options: Any) -> Any:
        if self == path and reads[0] < number:
            reads[0] += 1
            if reads[0] == number:
                act()
        return opened(self, *mode, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", counting)
        yield reads


READS = 1 + 3 + 1
"""Of a lock that is taken over: when it is found, while it is watched for 3 s, and before it is set aside."""


@pytest.mark.parametrize("number", range(1, READS + 1))
def test_of_two_takers_one_takes_over(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "WATCH_S", 3.0)
    left_by(tmp_path, machine="gone")
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    with before_read(tmp_path / "lock.json", number, first.take), pytest.raises(FolderError):
        second.take()
    holder = held(tmp_path)["token"]
    first.check()
    assert names_in(tmp_path) == ["lock.json"] and held(tmp_path)["token"] == holder


def test_a_lock_is_read_no_oftener_before_it_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the moments are all in which another one may come."""
    monkeypatch.setattr(locks, "WATCH_S", 3.0)
    left_by(tmp_path, machine="gone")
    with before_read(tmp_path / "lock.json", 100, lambda: None) as reads:
        taken(tmp_path)
    assert reads == [READS]


def test_of_many_takers_one_takes_over(tmp_path: Path) -> None:
    for _ in range(20):
        left_by(tmp_path, machine="gone")
        won: list[FolderLock] = []

        def take(won: list[FolderLock] = won) -> None:
            with suppress(FolderError):
                won.append(taken(tmp_path))

        takers = [Thread(target=take) for _ in range(6)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        sure = []
        for lock in won:
            try:
                lock.check()
                sure.append(lock)
            except FolderError:
                lock.release()
        assert len(sure) == 1, "who was overtaken learns it before it writes"
        sure[0].release()
        assert names_in(tmp_path) == []


def test_a_holder_that_was_taken_over_stops_and_leaves_its_successor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended, successor = elsewhere(tmp_path), taken(tmp_path)
    suspended.check_known()
    for _ in range(2):
        with pytest.raises(FolderError, match="is held by another run now, which took this one for dead: host"):
            suspended.check()
    with pytest.raises(FolderError):
        suspended.check_known()
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("moved the lock of another"))
    suspended.release()
    successor.check()


@pytest.mark.parametrize("number", range(1, READS + 2))
def test_one_that_wakes_up_before_it_is_set_aside_stays(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: Slept
) -> None:
    """Before one of the reads, or after the last one, before it is renamed."""
    there, rename = elsewhere(tmp_path), Path.rename

    def wake() -> None:
        there.check()
        slept.insert(0, there.check)  # and it counts on, where it is watched again

    def late(self: Path, target: Path) -> Path:
        if number > READS and self == there.path and not slept:
            wake()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    monkeypatch.setattr(locks, "WATCH_S", 3.0)
    with before_read(there.path, number, wake), pytest.raises(FolderError, match="is in use by another run"):
        FolderLock(tmp_path).take()
    there.check()
    assert names_in(tmp_path) == ["lock.json"]


def test_one_that_was_suspended_does_not_come_back_after_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor has let go of the folder; what it has saved is newer than all that this run knows."""
    now = [time.monotonic()]
    monkeypatch.setattr(locks.time, "monotonic", lambda: now[0])
    suspended = elsewhere(tmp_path)
    now.append(now.pop() + 30)
    (tmp_path / "lock.json").unlink()
    suspended.check()  # nobody gives a holder up so soon
    taken(tmp_path).release()
    now.append(now.pop() + 46)
    for _ in range(2):
        with pytest.raises(FolderError, match="may have been another run's: its lock is gone, last renewed 46 s ago"):
            suspended.check()
    suspended.release()
    assert names_in(tmp_path) == []


def test_what_others_have_put_beside_the_lock_refuses_nobody(tmp_path: Path, told: list[str]) -> None:
    """A copy of somebody's, and leftovers: of a killed start, of one that lives, and one that cannot be removed."""
    alive = content(tmp_path)
    left_by(tmp_path, pid=2**22 + 1)
    dead = (tmp_path / "lock.json").read_bytes()
    (tmp_path / "lock.json.bak").write_text("mine")
    (tmp_path / "lock.json.00000000").write_bytes(dead)
    (tmp_path / "lock.json.00000001").write_bytes(alive)
    (tmp_path / "lock.json.00000002").mkdir()
    (tmp_path / "lock.json.00000003").touch()
    lock = taken(tmp_path)
    lock.check()
    assert names_in(tmp_path) == ["lock.json", "lock.json.00000001", "lock.json.00000002", "lock.json.bak"]
    assert [line for line in told if "cannot be removed" in line] == [
        f"the stale file {tmp_path / 'lock.json.00000002'} cannot be removed: Is a directory"
    ]
    lock.release()


def test_a_lock_that_somebody_has_removed_is_put_back(tmp_path: Path) -> None:
    lock = taken(tmp_path)
    token = held(tmp_path)["token"]
    for lose in (Path.unlink, lambda path: path.write_bytes(b"")):
        lose(tmp_path / "lock.json")
        lock.check()
        assert held(tmp_path)["token"] == token


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/nonexistent"), lambda path: path.symlink_to("/"), Path.mkdir, os.mkfifo]
)
def test_what_is_no_file_is_refused(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "lock.json")
    with pytest.raises(FolderError, match=r"lock\.json is not a file, so it cannot be the lock of a run; remove it"):
        FolderLock(tmp_path).take()
    assert names_in(tmp_path) == ["lock.json"]


def test_a_folder_that_was_removed_is_said(tmp_path: Path) -> None:
    lock = taken(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FolderError, match="run has been removed; this run stops"):
        lock.check()
    lock.release()


def test_without_hard_links_it_is_made_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", raising(OSError(errno.EPERM, "Operation not permitted")))
    taken(tmp_path)
    with pytest.raises(FolderError):
        FolderLock(tmp_path).take()
    assert names_in(tmp_path) == ["lock.json"]


def test_an_answer_of_nfs_that_was_lost_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    taken(tmp_path)
    assert names_in(tmp_path) == ["lock.json"]


@contextmanager
def beats(counts: Callable[[], bool] = lambda: True) -> Iterator[Event]:
    """Yields what is set when a count has been written, if it is one that counts."""
    beaten, write = Event(), os.pwrite

    def wrote(*what: Any) -> int:
        counting, written = counts(), write(*what)
        if counting:
            beaten.set()
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", wrote)
        yield beaten


def test_a_count_that_fails_is_told_once_and_tried_again(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.01)
    lock = taken(tmp_path)
    before = held(tmp_path)["count"]
    opened, failures = os.open, [OSError(errno.ESTALE, "Stale file handle")] * 3

    def stale(path: Any, *flags: Any) -> int:
        if path == lock.path and failures:
            raise failures.pop()
        return opened(path, *flags)

    monkeypatch.setattr(os, "open", stale)
    with beats(lambda: not failures) as beaten:
        assert beaten.wait(30)
    assert told == [f"{tmp_path / 'lock.json'} cannot be renewed: Stale file handle; trying again every 0.01 s"]
    assert held(tmp_path)["count"] > before
    lock.release()


def test_a_folder_is_held_though_its_count_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full fails the save itself, or lets it through; another run's lock is still seen."""
    lock = taken(tmp_path)
    monkeypatch.setattr(os, "pwrite", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    lock.check()
    (tmp_path / "lock.json").write_text(json.dumps({"token": "another's"}))
    with pytest.raises(FolderError, match="is held by another run now"):
        lock.check()


def test_a_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.001)
    with beats() as beaten:
        lock = taken(tmp_path)
        assert beaten.wait(30)
    lock.release()
    assert names_in(tmp_path) == []
