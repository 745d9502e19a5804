"""Rendezvous of the launchers of all nodes: node 0 announces the store's port, collects exit codes, and decides.

The launchers are connected in a star, over TCP, at the host and port that are given to all of them. Messages are JSON
objects:

    {"node", "nodes", "ranks", "statement"}
                                 to node 0, first of all: who this is, and of which job (`titan.ranks.meeting.same_job`)
    {"joined": true}             from node 0: this launcher is one of the run
    {"refused": why}             from node 0: it is not
    {"meet": port}               from node 0: start your ranks; they meet at this port of its host
    {"stop": true}               from node 0: a rank elsewhere has failed, yours cannot finish
    {"ended", "heard", "stuck"}  to node 0: how your ranks ended, which signals you were sent, which ranks survived
                                 SIGKILL
    {"end": code}                from node 0: the exit code of the run

Until all are there, node 0 reads from its callers as bytes come. Whoever says something else, or nothing, is let go and
keeps nobody waiting. A launcher of another run is refused alone; one of the same run that states another job ends it.

Node 0 starts an attempt only when all have told it how the last one ended, and each attempt has a store and a port of
its own: no rank of an earlier one can get into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait

from titan.errors import ConfigError, PreemptedError, TitanError
from titan.ranks.meeting import signals, slurm
from titan.ranks.meeting.caller import LONGEST, Caller, Message, UnknownCallerError
from titan.ranks.meeting.launch_env import LaunchEnv
from titan.ranks.meeting.same_job import APART, Statement, misfits, other_run, refusal, remarks
from titan.ranks.meeting.store import RESOLVE_S, check_host
from titan.terminal import say

JOIN_S = 1800.0  # longest wait for the other nodes, where no job says another
HELLO_S = 10.0  # longest wait for the first message of a new connection
ANSWER_S = 60.0  # longest wait for the answer of node 0, to which a thousand nodes may talk at once

LOOK_S = 0.2  # between two looks for a signal, or tries to connect

# After a signal, by so much another node ends after node 0, which asks Slurm to run the job again: `srun
# --kill-on-bad-exit` ends all as soon as one has ended.
LAST_S = 5.0
WAITING = "while waiting for other nodes"


class NodeLostError(TitanError):
    """The launcher of another node closed its connection, or did not connect in time."""


class Nodes:
    """The other launchers of a run, as one of them sees them: node 0 all others, they node 0."""

    def __init__(self, links: Mapping[int, Connection]) -> None:
        self.links = dict(links)

    def tell(self, message: Message) -> None:
        """Send to everyone who is still there."""
        for node in list(self.links):
            try:
                self.links[node].send_bytes(json.dumps(message).encode())
            except OSError:
                self._lose(node)

    def hear(self, node: int) -> Message:
        """The next message of a node; waits for it. NodeLostError: the node is gone."""
        try:
            return _read(self.links[node])
        except (KeyError, EOFError, OSError, ValueError):
            self._lose(node)
            raise NodeLostError(f"the launcher of node {node} no longer responds") from None

    def await_word(self, node: int) -> None:
        """Return when a node has something to say or is gone; in the body of `signals.raised`, a signal ends it."""
        while node in self.links and not self.links[node].poll(LOOK_S):
            signals.check()

    def _lose(self, node: int) -> None:
        if node in self.links:
            self.links.pop(node).close()


@contextlib.contextmanager
def meet(place: LaunchEnv, statement: Statement, limit_s: float = JOIN_S) -> Iterator[Nodes]:
    """Find the other launchers; on a single node there are none. statement: of the job that this node is to run.
    limit_s: longest wait for the others.

    Raises:
        ConfigError: the port is taken, the host's name does not resolve, or the nodes do not state the same job.
        NodeLostError: some node was not there within the limit.
        PreemptedError: a signal came while this node waited.
    """
    if place.nodes == 1:
        yield Nodes({})
        return
    links: dict[int, Connection] = {}
    try:
        try:
            with signals.raised(WAITING):
                check_host(place.host, place.port, limit_s=min(limit_s, RESOLVE_S))
                if place.node:
                    links[0] = _join(place, statement, limit_s)
                else:
                    _Gathering(place, statement, links).gather(limit_s)
        except TitanError as error:
            if isinstance(error, PreemptedError) and place.node == 0:
                leave(place, error)
            Nodes(links).tell({"end": error.exit_code})
            raise
        yield Nodes(links)
    finally:
        for link in links.values():
            with contextlib.suppress(OSError):
                link.close()


def leave(place: LaunchEnv, error: PreemptedError) -> None:
    """A signal ends this launcher before there are ranks: say so, and on node 0 ask Slurm, before others end."""
    say(str(error))
    if place.node == 0:
        slurm.requeue(os.environ, signals.heard())
    elif os.environ.get("SLURM_JOB_ID"):
        time.sleep(LAST_S)


def listen(port: int) -> socket.socket:
    """A socket that listens on every address of this node; port 0 takes a free one. OSError: the port is taken."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)


class _Gathering:
    """Node 0 while the others come; `links` has those that are there."""

    def __init__(self, place: LaunchEnv, statement: Statement, links: dict[int, Connection]) -> None:
        self._place, self._statement, self._links = place, statement, links
        self._callers: dict[socket.socket, Caller] = {}
        self._refused: set[str] = set()

    def gather(self, limit_s: float) -> None:
        place = self._place
        say(f"waiting for {place.nodes - 1} other nodes at {place.host}:{place.port}")
        try:
            server = listen(place.port)
        except OSError as error:
            why = f"MASTER_PORT = {place.port}: {error.strerror}; choose a port that no program on node 0 has"
            raise ConfigError(why, "environment") from None
        server.setblocking(False)
        deadline = time.monotonic() + limit_s
        with server:
            try:
                while len(self._links) < place.nodes - 1:
                    self._look(server)
                    if time.monotonic() > deadline:
                        absent = sorted(set(range(1, place.nodes)) - set(self._links))
                        why = f"nodes {absent} did not connect within {limit_s:g} s (comm.init_timeout_s)"
                        raise NodeLostError(why)
            finally:
                for link in self._callers:
                    link.close()

    def _look(self, server: socket.socket) -> None:
        signals.check()
        ready = wait([server, *self._callers, *self._links.values()], LOOK_S)
        for node in [node for node, link in self._links.items() if link in ready]:
            self._links.pop(node).close()  # a node has nothing to say yet: it has left
            say(f"node {node} has left; waiting for it again")
        for caller in [caller for link, caller in self._callers.items() if link in ready]:
            self._hear(caller)
        for caller in [caller for caller in self._callers.values() if time.monotonic() > caller.deadline]:
            self._ignore(caller)
        with contextlib.suppress(OSError):  # nobody else calls, or whoever called has left
            while server in ready:
                called, address = server.accept()
                called.setblocking(False)
                self._callers[called] = Caller(called, address[0].removeprefix("::ffff:"), time.monotonic() + HELLO_S)

    def _hear(self, caller: Caller) -> None:
        try:
            hello = caller.read()
        except UnknownCallerError:
            self._ignore(caller)
            return
        if hello is not None:
            del self._callers[caller.link]
            self._judge(hello, caller.address, _connection(caller.link))

    def _ignore(self, caller: Caller) -> None:
        self._callers.pop(caller.link).link.close()
        self._say_once(f"ignored a connection from {caller.address} that is no launcher of this run")

    def _judge(self, hello: Message, address: str, link: Connection) -> None:
        """Take a launcher into the run, or refuse it; one of this run that states another job ends the run."""
        node, theirs = hello["node"], hello["statement"]
        faults = misfits(theirs, self._statement, f"node {node}", "node 0")
        if other_run(theirs, self._statement):
            where = f"{self._place.host}:{self._place.port}"
            why = f"another run waits at MASTER_ADDR and MASTER_PORT, {where}; {APART}"
            _answer(link, {"refused": "\n".join([why, *faults])})
            link.close()
            self._say_once(f"refused node {node} of another run, at {address} ({faults[0]})")
            return
        if error := self._misplaced(hello) or (refusal(faults) if faults else None):
            _answer(link, {"refused": str(error)})
            link.close()
            raise error
        for sentence in remarks(theirs, self._statement, f"node {node}", "node 0"):
            say(f"warning: {sentence}")
        _answer(link, {"joined": True})
        self._links[node] = link

    def _misplaced(self, hello: Message) -> ConfigError | None:
        node, place = hello["node"], self._place
        for name, value, ours in (("NNODES", hello["nodes"], place.nodes), ("NPROC", hello["ranks"], place.ranks)):
            if value != ours:
                return ConfigError(f"{name} = {value} on node {node}, but {ours} on node 0", "environment")
        if node in (0, *self._links):
            return ConfigError(f"NODE_RANK = {node} is set on two nodes; each node needs its own", "environment")
        return None

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._refused:
            self._refused.add(sentence)
            say(f"warning: {sentence}")


def _answer(link: Connection, message: Message) -> None:
    with contextlib.suppress(OSError):
        link.send_bytes(json.dumps(message).encode())


def _join(place: LaunchEnv, statement: Statement, limit_s: float) -> Connection:
    deadline, told = time.monotonic() + limit_s, False
    while True:
        try:
            link = _connection(socket.create_connection((place.host, place.port), timeout=HELLO_S))
            if _is_taken(link, place, statement, min(ANSWER_S, limit_s)):
                return link
            error: Exception = ConnectionError("the connection was closed")
        except OSError as failure:
            error = failure
        if time.monotonic() > deadline:
            what = f"node 0 did not answer at {place.host}:{place.port} within {limit_s:g} s ({error})"
            raise NodeLostError(f"{what}; check MASTER_ADDR, MASTER_PORT and node 0") from None
        if not told:
            say(f"waiting for node 0 at {place.host}:{place.port} ({error})")
        told = True
        signals.check()
        time.sleep(LOOK_S)


def _is_taken(link: Connection, place: LaunchEnv, statement: Statement, answer_s: float) -> bool:
    """Whether node 0 takes this launcher into the run; False: the connection was closed, perhaps by a former run's."""
    hello = {"node": place.node, "nodes": place.nodes, "ranks": place.ranks, "statement": json.loads(statement.text)}
    try:
        link.send_bytes(json.dumps(hello).encode())
        deadline = time.monotonic() + answer_s
        while not link.poll(LOOK_S):
            signals.check()
            if time.monotonic() > deadline:
                raise ValueError("no answer")
        message = _read(link)
    except (EOFError, ConnectionError):
        link.close()
        return False
    except (OSError, ValueError):
        link.close()
        what = f"MASTER_ADDR = {place.host}, MASTER_PORT = {place.port}: what listens there is no launcher of titan"
        raise ConfigError(f"{what}; give the run a port that no program has", "environment") from None
    if "refused" in message:
        link.close()
        raise ConfigError(str(message["refused"]))
    return True


def _connection(connected: socket.socket) -> Connection:
    """Messages over a socket. A machine that lost its power or network is noticed after a minute."""
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(connected.detach())


def _read(link: Connection) -> Message:
    said = json.loads(link.recv_bytes(LONGEST))
    if not isinstance(said, dict):
        raise ValueError(f"no message: {said!r}")
    return said
