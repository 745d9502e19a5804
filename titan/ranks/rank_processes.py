"""The ranks of this node as child processes: starting, forwarding signals, monitoring, and restarting.

Without GPUs they are forked from one process that has imported everything: eight of them on two cores meet after 2.4 s
instead of 11.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.distributed import Store, TCPStore

from titan.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from titan.machine import process_state
from titan.paths import check_python
from titan.ranks import failure
from titan.ranks.failure import Expendable
from titan.ranks.meeting import signals
from titan.ranks.meeting.launch_env import LOCAL, Environment, LaunchEnv
from titan.ranks.meeting.rendezvous import WAITING, NodeLostError, Nodes, listen
from titan.terminal import say

GRACE_S = 10.0  # after a rank failed the others cannot finish; this long they may say so before they are killed
STACKS_S = 0.5  # a rank that is to be killed has this long to write its stacks (`titan.ranks.watchdog.answer_to_quit`)

# Longest wait for processes to be gone that were killed or have closed their files. No signal ends one that waits in
# the kernel, for a file system that does not answer or for a device.
KILLED_S = 120.0
LOOK_S = 0.01
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
Entry = Callable[[list[str]], int]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, or minus the number of the signal that killed it."""

    rank: int
    code: int

    @property
    def failed(self) -> bool:
        """Whether the rank ended neither done (0) nor preempted (75)."""
        return self.code not in (EXIT_DONE, EXIT_PREEMPTED)

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} failed with exit code {self.code}"
        hint = " (out of memory?)" if -self.code == signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}{hint}"


@dataclass
class RankProcesses:
    """The ranks of this node, each the life of `sys.exit(entry(argv))`.

    heard: the signals that this process or one of its ranks was sent, on node 0 also those of other nodes; somebody
    wants the run to end. Of a signal to a rank alone this process learns when that rank has ended by itself.
    stuck: the ranks that SIGKILL did not end, on node 0 also those of other nodes; they may still write to the run's
    folder. Once there are any, this process ends with `EXIT_FAILED`, whatever it is told to end with.
    explained: on node 0, the rank that failed first, if its error has been printed as a message.
    stopped: on node 0, whether that rank was asked to stop, and so the run is preempted.
    """

    entry: Entry
    argv: list[str]
    place: LaunchEnv
    fork: bool
    nodes: Nodes = field(default_factory=lambda: Nodes({}))
    heard: set[int] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)
    _processes: dict[int, BaseProcess] = field(default_factory=dict)
    _elsewhere: dict[int, list[Ended]] = field(default_factory=dict)
    _told: connection.Connection | None = None
    _first_to_fail: int | None = None
    explained: int | None = None
    stopped: bool = False
    expendable: Expendable = field(default_factory=Expendable)

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Pass SIGTERM, SIGINT and SIGUSR1 on to the ranks instead of dying of them; also what has come before."""
        self.heard |= signals.heard()
        before = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.heard:
                signals.hear_no_more()

    def _pass_on(self, number: int, _: FrameType | None = None) -> None:
        self.heard.add(number)
        for process in self._processes.values():
            # It may end between the question and the kill.
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, number)

    def lead(self) -> list[Ended]:
        """On node 0: all ranks of the run live once; how they ended: the rank that told the store first that it failed,
        then this node's in the order they ended, then those of other nodes. Those that outlive a failed one are killed
        after `GRACE_S` and are not listed, nor are those of workers that the run has gone on without."""
        self._elsewhere.clear()
        # The store listens before any rank starts, so its port is never free for others, and ranks that are early wait.
        with listen(0) if self.place.nodes > 1 else socket.create_server((LOCAL, 0), backlog=128) as listening:
            port = listening.getsockname()[1]
            self.nodes.tell({"meet": port})
            ended = self._live(port, listening)
        for node in range(1, self.place.nodes):
            if node not in self._elsewhere:
                self._hear(node)
        all_ended = sum((self._elsewhere[node] for node in sorted(self._elsewhere)), ended)
        kept = [end for end in all_ended if end.rank not in self.expendable.lost]
        return sorted(kept, key=lambda end: end.rank != self._first_to_fail)

    @property
    def lost(self) -> list[int]:
        """On node 0: nodes whose launcher is gone."""
        return sorted(set(range(1, self.place.nodes)) - set(self.nodes.links))

    @property
    def missed(self) -> list[int]:
        """Those of them without which the run does not go on."""
        of_node = {node: range(node * self.place.ranks, (node + 1) * self.place.ranks) for node in self.lost}
        return [node for node, ranks in of_node.items() if not self.expendable.lost.issuperset(ranks)]

    def follow(self) -> int:
        """On another node: do as node 0 says; the exit code of the run, which it says in the end."""
        with signals.raised(WAITING):
            self.nodes.await_word(0)
        with self.hearing():
            said = self.nodes.hear(0)
            while "end" not in said:
                if "meet" in said:  # or else an old "stop", which has crossed our last report
                    ended = self._live(said["meet"])
                    codes = [(end.rank, end.code) for end in ended]
                    self.nodes.tell({"ended": codes, "heard": sorted(self.heard), "stuck": sorted(self.stuck)})
                said = self.nodes.hear(0)
        return int(said["end"])

    def _live(self, port: int, listening: socket.socket | None = None) -> list[Ended]:
        store: Store | None = None
        try:
            self._start(port)
            if listening is not None:  # served only now: a process with threads, as the store has, should not fork
                store = TCPStore(
                    LOCAL, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
                )
            self.expendable.start(store, lambda limit: _connect(self.place.host, port, limit))
            ended = self._wait()
            self._hear_ranks()
            assert self._told is not None
            self._told.close()
            self.expendable.stop()
            if listening is not None and store is not None:
                self._first_to_fail, self.explained, self.stopped = failure.cause(store)
            return ended
        finally:
            self._kill()

    def _start(self, port: int) -> None:
        context: Any = multiprocessing.get_context("fork" if self.fork else "spawn")
        if not self.fork:
            check_python()
            resource_tracker.ensure_running()  # multiprocessing needs it then, and its start would unblock signals
        self._told, tell = context.Pipe(duplex=False)
        # A signal that comes now is heard when all ranks are there, and by each when it can take note of it.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        for local_rank in range(self.place.ranks):
            environment = self.place.environment(local_rank)
            # What torchrun's agent tells its ranks: the store is served already, rank 0 is a client like all.
            environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            process = context.Process(target=_be_rank, args=(self.entry, self.argv, environment, os.getpid(), tell))
            process.start()
            self._processes[int(environment["RANK"])] = process
        tell.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        for number in tuple(self.heard):
            self._pass_on(number)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for rank in _still_there(self._processes, KILLED_S):
            pid = self._processes[rank].pid
            there = f"rank {rank}, process {pid}, still exists {KILLED_S:g} s after SIGKILL: {process_state(pid)}"
            say(f"error: {there}. It may still write to the run's folder; end it before you start the run again")
            if not self.stuck:
                atexit.register(_leave)
            self.stuck.add(rank)
        self._processes.clear()

    def _wait(self) -> list[Ended]:
        running: dict[Any, int] = {process.sentinel: rank for rank, process in self._processes.items()}
        links: dict[Any, int] = {link: node for node, link in self.nodes.links.items()}
        ended: list[Ended] = []
        deadline, lost = None, False
        while running:
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = connection.wait([*running, *links], patience)
            if not ready:
                for rank in running.values():
                    process = self._processes[rank]
                    say(f"rank {rank} did not exit within {GRACE_S:g} s of another rank's failure; killing it. Stacks:")
                    if process.pid is not None:
                        os.kill(process.pid, signal.SIGQUIT)
                    _still_there({rank: process}, STACKS_S)
                break
            if not (lost or running.keys().isdisjoint(ready)):
                self.expendable.connect()
            for handle in sorted(ready, key=lambda handle: running.get(handle, -1) in self.expendable):
                if handle in links:
                    lost |= self._hear(links.pop(handle))
                    continue
                ended.append(self._end(running.pop(handle)))
                self._share_signals(ended[-1])
                lost |= ended[-1].failed and (lost or not self._spare([ended[-1].rank], ended[-1]))
            if deadline is None and (lost or self._only_expendable(running.values(), ended)):
                deadline = time.monotonic() + GRACE_S
                if self.place.node == 0:
                    self.nodes.tell({"stop": True})
        return ended

    def _spare(self, ranks: Iterable[int], cause: object) -> bool:
        """Whether the run goes on without these ranks; what this node has of their workers then ends too."""
        spared = self.expendable.lose(ranks, cause)
        for rank in self.expendable.lost & self._processes.keys():
            self._processes[rank].kill()
        return spared

    def _only_expendable(self, running: Iterable[int], ended: Sequence[Ended]) -> bool:
        """Whether all ranks that the run needs have ended, on the only node; what is left of lost workers may hang."""
        needed_one = any(end.rank not in self.expendable for end in ended)
        return self.place.nodes == 1 and needed_one and all(rank in self.expendable for rank in running)

    def _end(self, rank: int) -> Ended:
        """How a rank ended that has closed its files, as a process does shortly before it is gone."""
        process = self._processes[rank]
        stuck = _still_there({rank: process}, KILLED_S)
        return Ended(rank, EXIT_FAILED if stuck else process.exitcode or 0)

    def _hear_ranks(self) -> None:
        assert self._told is not None
        with contextlib.suppress(EOFError):
            while self._told.poll():
                self.heard |= set(self._told.recv_bytes())

    def _share_signals(self, end: Ended) -> None:
        """Pass on what one rank alone was sent and has ended by: before they train, ranks do not agree on signals."""
        if end.code == EXIT_PREEMPTED:
            known = set(self.heard)
            self._hear_ranks()
            for number in self.heard - known:
                self._pass_on(number)

    def _hear(self, node: int) -> bool:
        """Hear what a node has to say in an attempt, one thing at most; whether the attempt is lost by that."""
        try:
            said = self.nodes.hear(node)
        except NodeLostError:
            ranks = range(node * self.place.ranks, (node + 1) * self.place.ranks)
            return not self._spare(ranks, f"the launcher of node {node} no longer responds")
        if "ended" not in said:
            return True
        self._elsewhere[node] = [Ended(rank, code) for rank, code in said["ended"]]
        for number in set(said["heard"]) - self.heard:
            self._pass_on(number)
        self.stuck |= set(said["stuck"])
        return not all(self._spare([end.rank], end) for end in self._elsewhere[node] if end.failed)


def _connect(host: str, port: int, limit_s: float) -> Store:
    socket.create_connection((host, port), timeout=limit_s).close()  # a TCPStore would try again, and write a trace
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s))


def _be_rank(entry: Entry, argv: list[str], environment: Environment, parent: int, tell: connection.Connection) -> None:
    """The life of a rank's process. All ranks of a node tell the launcher over one pipe, a byte for each signal."""
    _die_with(parent)
    # Ctrl-C reaches every process of a terminal's session, and the parent passes it on: out of the session, a rank
    # hears it once.
    os.setsid()
    os.environ.update(environment)
    if "torch" in sys.modules:  # OpenMP reads OMP_NUM_THREADS when it is loaded: in a forked rank before it is set
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with signals.listening():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        code = entry(argv)
        tell.send_bytes(bytes(signals.heard()))
        signals.hear_no_more()
        sys.exit(code)


def _die_with(parent: int) -> None:
    """No orphans: a rank whose launcher was killed would go on writing to a run that somebody may have resumed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(EXIT_FAILED)


def _still_there(processes: Mapping[int, BaseProcess], patience_s: float) -> list[int]:
    """The ranks whose processes are not gone within that time. Looks, as `join` may wait for ever, whatever its limit:
    it takes a process that has closed its files for one that is gone."""
    deadline = time.monotonic() + patience_s
    while left := [rank for rank, process in processes.items() if process.is_alive()]:
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_S)
    return left


def _leave() -> None:
    """End this process at once. Its usual end would wait for the ranks it has started, for ever."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(EXIT_FAILED)
