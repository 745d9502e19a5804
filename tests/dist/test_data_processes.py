"""The data path with processes of its own: what workers read and make is what one process reads and makes."""

import errno
import multiprocessing
import multiprocessing.synchronize
import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.lines import nothing_kept
from tests.sweeps import but_sweep
from tests.unit.test_data_samples import count_up, samples, tokens_of
from tests.unit.test_data_shards import write
from titan.contracts import Dataset
from titan.contracts.plugin import registry
from titan.data.samples.loader import Loader, _Sent
from titan.data.samples.samples import Sample, Samples
from titan.data.tokens import tokenize, unfinished
from titan.data.tokens.prepare import prepare
from titan.errors import DataError, PreemptedError, ResourceError
from titan.plugins.data.text import Config as TextConfig
from titan.plugins.data.text import Text
from titan.plugins.tokenizers.byte import Byte
from titan.plugins.tokenizers.byte import Config as ByteConfig
from titan.ranks.meeting import signals
from titan.testing.ranks import run_ranks

BYTES = Byte(ByteConfig())


def loader(source: Any, workers: int, **more: Any) -> Loader:
    sizes = {"global_batch": 8, "micro_batch": 4, "first": 0, "index": 0, "ranks": 1, **more}
    return Loader(source, workers=workers, device=torch.device("cpu"), **sizes)


def test_workers_change_nothing_and_faults_keep_their_words(tmp_path: Path) -> None:
    mixed = samples(
        (count_up(tmp_path / "a.bin", 201), 2.0),
        (count_up(tmp_path / "b.bin", 121, 500), 1.0),
        shuffle=True,
        vocab_size=1000,
    )
    alone, ahead = loader(mixed, 0, first=16), loader(mixed, 2, first=16)
    for expected, found in zip(tokens_of(alone, 5), tokens_of(ahead, 5), strict=True):
        assert torch.equal(expected, found)
    assert ahead.state_dict()["samples"] == 56
    ahead.close()

    bad = samples(([write(tmp_path / "bad.bin", [[1] * 100 + [77] * 20])], 1.0), vocab_size=77)
    faulty = loader(bad, 1)
    tokens_of(faulty, 3)
    with pytest.raises(DataError, match=r"^shard .*bad\.bin: token 100 is 77, outside the vocabulary of 77; make"):
        next(faulty)
    faulty.close()


class Silent:
    """Samples of which those from number `since` on never come; `first` is called when one is asked for."""

    fingerprint = "f"

    def __init__(self, since: int, first: Callable[[], None] = lambda: None) -> None:
        self.since, self.first, self.ends = since, first, threading.Event()

    def __getitem__(self, g: int) -> Sample:
        if g == self.since:
            self.first()
        if g >= self.since:
            self.ends.wait()
        return Sample(torch.tensor([g, g]), torch.tensor([g, g]), None)


def test_data_that_do_not_come_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.data.samples.loader.LOOK_S", 0.02)
    source = Silent(2)
    limits = ((60.0, "comm.init_timeout_s"), (0.1, "comm.timeout_s"))
    waits = loader(source, 0, global_batch=2, micro_batch=2, limits=limits)
    assert next(waits)[0].tokens.tolist() == [[0, 0], [1, 1]]
    said = r"no data for a step within 0.1 s \(comm.timeout_s\); the training process reads"
    with pytest.raises(ResourceError, match=said):
        next(waits)
    source.ends.set()


def test_a_signal_ends_the_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.data.samples.loader.LOOK_S", 0.02)
    monkeypatch.setattr("titan.data.samples.loader.PATIENCE_S", 0.1)
    source = Silent(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    waits = loader(source, 0, global_batch=2, micro_batch=2, limits=((20.0, "a limit"), (20.0, "a limit")))
    with signals.listening():
        next(waits)
        with pytest.raises(PreemptedError, match="preempted by SIGTERM while waiting for data"):
            next(waits)
    source.ends.set()


def test_batches_of_processes_need_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose tensors find no room in /dev/shm prints so, and its batch never comes."""
    source = samples((count_up(tmp_path / "a.bin", 201), 1.0), shuffle=False, vocab_size=1000, packing="pad")
    expected = loader(source, 0)._start()()
    process = loader(source, 1)
    sent = process._start()()
    assert isinstance(sent, _Sent)
    for share in ("_share_fd_cpu_", "_share_filename_cpu_"):
        monkeypatch.delattr(torch.UntypedStorage, share)
    arrived = pickle.loads(bytes(ForkingPickler.dumps(sent))).columns()
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(arrived, expected, strict=True))
    arrived[0].zero_()  # nobody else has this memory
    process.close()


@pytest.mark.usefixtures("small_units")
def test_processes_that_cannot_be_started_name_the_key(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues between processes have semaphores, which are files in /dev/shm."""

    source = samples((count_up(tmp_path / "a.bin", 201), 1.0), vocab_size=1000)
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", full)
    no_space = r"processes cannot be started \(No space left on device\); set data."
    with pytest.raises(ResourceError, match=f"data loader {no_space}workers = 0 to load in the training process"):
        next(loader(source, 1))
    with pytest.raises(ResourceError, match=f"tokenizing {no_space}prepare_workers = 1 to tokenize in this process"):
        prepare(Text(TextConfig(path=str(text))), BYTES, cache=tmp_path / "cache", workers=2, progress=False)


def _kill_a_loader_process(folder: Path) -> str:
    """What is said, once the other process has ended too."""
    reading = loader(samples((count_up(folder / "a.bin", 4001), 1.0), vocab_size=5000), 2)
    next(reading)
    first, second = (child.pid for child in multiprocessing.active_children())
    left = os.pidfd_open(second)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ResourceError) as error:
        for _ in range(20):
            next(reading)
    reading.close()  # while the exception holds the iterator, as at the end of a run
    ended, _, _ = select.select([left], [], [], 30)
    return str(error.value) if ended else "the other process still runs"


@pytest.mark.sweep
def test_a_killed_loader_process_ends_the_others(tmp_path: Path) -> None:
    """In a process of its own: PyTorch leaves files open where a process that reads for it was killed."""
    [said] = run_ranks(_kill_a_loader_process, 1, tmp_path, init=False)
    assert said.startswith("a data loader process was killed, possibly for lack of memory; set data.workers = 0 ")


def _read_and_die(folder: Path, outbox: Connection) -> None:
    reading = loader(samples((count_up(folder / "a.bin", 4001), 1.0), vocab_size=5000), 2)
    next(reading)
    outbox.send([child.pid for child in multiprocessing.active_children()])
    os.kill(os.getpid(), signal.SIGKILL)


def test_loader_processes_end_with_a_killed_rank(tmp_path: Path) -> None:
    inbox, outbox = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("spawn").Process(target=_read_and_die, args=(tmp_path, outbox))
    rank.start()
    watched = [os.pidfd_open(pid) for pid in inbox.recv()]
    rank.join()
    for descriptor in watched:
        assert select.select([descriptor], [], [], 30)[0], "a loader process outlives its rank"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"{number} some words\n" * 40)
    return folder


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes for texts of a few hundred bytes."""
    monkeypatch.setattr(tokenize, "UNIT_BYTES", (1000, 1000))
    monkeypatch.setattr(tokenize, "WORTH_A_PROCESS", 1)


@pytest.mark.usefixtures("small_units")
def test_processes_change_nothing(text: Path, tmp_path: Path) -> None:
    dataset = Text(TextConfig(path=str(text)))
    made = [
        [s.path for s in prepare(dataset, BYTES, cache=tmp_path / str(workers), workers=workers, progress=False)]
        for workers in (1, 2)
    ]
    assert len(made[0]) == 8
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]


@pytest.mark.usefixtures("small_units")
def test_faults_of_processes_keep_their_words(text: Path, tmp_path: Path) -> None:
    (text / "5.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"^\S*5\.txt: not UTF-8 at byte 2$"):
        prepare(Text(TextConfig(path=str(text))), BYTES, cache=tmp_path / "cache", workers=2, progress=False)
    assert nothing_kept(tmp_path / "cache")


SHOUTED = '''
"""A dataset from a user's folder."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan.contracts import Dataset, Document, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    path: str = option("", "folder")


@register
class Shouted(Dataset):
    """Text in capitals."""

    name = "shouted"
    Config = Config

    def files(self) -> list[Path]:
        return sorted(Path(self.config.path).iterdir())

    def documents(self, file: Path) -> Iterator[Document]:
        (file.parent.parent / "pids" / str(os.getpid())).touch()
        if (file.parent.parent / "killed").exists():
            os.kill(os.getpid(), 9)
        yield Document(file.read_text().upper(), str(file))
'''


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("home", ["mine", "jane.doe/v1.2", "zwölf Köpfe/ü"])
def test_processes_know_plugins_of_a_users_folder(home: str, text: Path, tmp_path: Path) -> None:
    (tmp_path / home).mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    (tmp_path / home / "shouted.py").write_text(SHOUTED)
    beside = tmp_path / f"{home}_shouted.py"
    beside.write_text(SHOUTED.replace('"shouted"', '"another"'))
    registry.load_plugins([tmp_path / home / "shouted.py", beside])
    dataset = _dataset("shouted", text)
    shards = prepare(dataset, BYTES, cache=tmp_path / "cache", workers=2, progress=False)
    assert len(shards) == 8 and b"S\0O\0M\0E" in shards[3].path.read_bytes()
    pids = {int(path.name) for path in (tmp_path / "pids").iterdir()}
    assert pids and os.getpid() not in pids, "processes of their own have read the text"
    if home != "mine":
        return

    (tmp_path / "killed").touch()
    with pytest.raises(ResourceError, match=r"was killed, possibly .*; set data\.prepare_workers below 2$"):
        prepare(dataset, BYTES, cache=tmp_path / "other", workers=2, progress=False)
    assert nothing_kept(tmp_path / "other")


ENDLESS = '''
"""Text that takes for ever to read; its reader asks the process that waits for it to stop."""

import os
import signal
import threading
from pathlib import Path

from titan.contracts import register
from titan.plugins.data.text import Text


@register
class Endless(Text):
    """Text without an end."""

    name = "endless"

    def documents(self, file):
        os.kill(int(Path(__file__).with_name("pid").read_text()), signal.SIGTERM)
        threading.Event().wait()
        yield
'''


def _dataset(name: str, text: Path) -> Dataset:
    """By a plugin that is loaded."""
    plugin = registry.find("dataset", name)
    assert plugin is not None
    dataset = plugin(plugin.Config(path=str(text)))
    assert isinstance(dataset, Dataset)
    return dataset


def _asked_while_processes_tokenize(text: Path, folder: Path) -> str:
    (folder / "endless.py").write_text(ENDLESS)
    (folder / "pid").write_text(str(os.getpid()))
    registry.load_plugins([folder / "endless.py"])
    dataset = _dataset("endless", text)
    tokenize.UNIT_BYTES, tokenize.WORTH_A_PROCESS = (1000, 1000), 1
    with signals.listening():
        try:
            with signals.raised("before training began"):
                prepare(dataset, BYTES, cache=folder / "cache", workers=2, progress=False)
        except PreemptedError as error:
            assert not multiprocessing.active_children()
            return str(error)
    return ""


def test_a_signal_ends_processes_that_tokenize(text: Path, tmp_path: Path) -> None:
    said = "preempted by SIGTERM before training began; to go on, run the same command"
    assert run_ranks(_asked_while_processes_tokenize, 1, text, tmp_path, init=False) == [said]
    assert nothing_kept(tmp_path / "cache")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from titan.data.tokens import hashes, prepare as preparing, shards, tokenize
    from titan.plugins.data.text import Config, Text
    from titan.plugins.tokenizers.byte import Byte, Config as Bytes

    hashes.clock_ns = lambda folder: 2**62  # however young the text is, it is remembered
    tokenize.UNIT_BYTES = (1000, 1000)
    calls, wanted = 0, int(sys.argv[3])

    def counted(function):
        def called(*args, **options):
            global calls
            calls += 1
            if calls == wanted:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)
        return called

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    Path.rename, Path.mkdir = counted(Path.rename), counted(Path.mkdir)
    text = Text(Config(path=sys.argv[1]))
    preparing.prepare(text, Byte(Bytes()), cache=Path(sys.argv[2]), workers=1, progress=False)
"""


@pytest.mark.parametrize("call", but_sweep([2, 6, 21, 30, 31], 2, 6, 30, 31))
def test_killed_at_any_moment_is_complete_or_absent(text: Path, tmp_path: Path, call: int) -> None:
    """Kills the preparer at its `call`-th step that reaches the disk, then prepares again."""
    dataset, cache = Text(TextConfig(path=str(text))), tmp_path / "cache"
    arguments = [sys.executable, "-c", textwrap.dedent(KILLED), str(text), str(cache), str(call)]
    ended = subprocess.run(arguments, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.returncode == -signal.SIGKILL
    expected = prepare(dataset, BYTES, cache=tmp_path / "undisturbed", workers=1, progress=False)
    found = prepare(dataset, BYTES, cache=cache, workers=1, progress=False)
    content = [
        b"".join(
            Samples([(p, 1.0)], seq_len=9, packing="concat", seed=0, shuffle=False, vocab_size=257)[g]
            .tokens.numpy()
            .tobytes()
            for g in range(50)
        )
        for p in (expected, found)
    ]
    assert content[0] == content[1]
    left = list(cache.glob(".partial*"))
    assert len(left) == (call < 31), "what was killed may be of another machine, and is left for a day"
    for path in [below for top in left for below in (*top.rglob("*"), top)]:
        os.utime(path, (0, 0))
    unfinished.sweep(cache)
    assert not list(cache.glob(".partial*"))
