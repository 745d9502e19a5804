"""Rendezvous of the launchers of all nodes: node 0 announces the store's port, collects exit codes, and decides.

The launchers are connected in a star, over TCP, at the host and port that are given to all of them. Messages are JSON
objects:

    {"node", "nodes", "ranks"}   to node 0, first of all {"meet": port}               from node 0: start your ranks;
    they meet at this port of its host {"stop": true}               from node 0: a rank elsewhere has failed, yours
    cannot finish {"ended", "heard", "stuck"}  to node 0: how your ranks ended, which signals you were sent, which ranks
    survived SIGKILL {"end": code}                from node 0: the exit code of the run

Node 0 starts an attempt only when all have told it how the last one ended, and each attempt has a store and a port of
its own: no rank of an earlier one can get into it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from titan.errors import ConfigError, ConfigIssue, TitanError, say
from titan.ranks.launch_env import LaunchEnv

JOIN_S = 1800.0
"""Longest wait for the other nodes to connect."""

HELLO_S = 10.0
"""Longest wait for the first message of a new connection; without one it is no launcher of this run, and is closed."""

LONGEST = 1 << 20
"""Bytes of a message at most."""

RETRY_S = 0.2

Message = dict[str, Any]


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
        """The next message of a node; waits for it.

        Raises:
            NodeLostError: the node is gone.
        """
        try:
            return _read(self.links[node])
        except (KeyError, EOFError, OSError, ValueError):
            self._lose(node)
            raise NodeLostError(f"the launcher of node {node} no longer responds") from None

    def _lose(self, node: int) -> None:
        if node in self.links:
            self.links.pop(node).close()


@contextlib.contextmanager
def meet(place: LaunchEnv) -> Iterator[Nodes]:
    """Find the other launchers; on a single node there are none.

    Raises:
        ConfigError: the port is taken, or the nodes do not fit together.
        NodeLostError: some node was not there within `JOIN_S`.
    """
    if place.nodes == 1:
        yield Nodes({})
        return
    links = _join(place) if place.node else _gather(place)
    with contextlib.ExitStack() as stack:
        for link in links.values():
            stack.enter_context(link)
        yield Nodes(links)


def listen(port: int) -> socket.socket:
    """A socket that listens on every address of this node; port 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)


def _gather(place: LaunchEnv) -> dict[int, Connection]:
    links: dict[int, Connection] = {}
    say(f"waiting for {place.nodes - 1} other nodes at {place.host}:{place.port}")
    try:
        server = listen(place.port)
    except OSError as error:
        raise ConfigError([ConfigIssue("environment", f"MASTER_PORT = {place.port}: {error.strerror}")]) from None
    deadline = time.monotonic() + JOIN_S
    with server:
        while len(links) < place.nodes - 1:
            if not wait([server], max(0.0, deadline - time.monotonic())):
                absent = sorted(set(range(1, place.nodes)) - set(links))
                raise NodeLostError(f"nodes {absent} did not connect within {JOIN_S:g} s")
            link = _connection(server.accept()[0])
            if (hello := _hello(link)) is None:
                link.close()
                continue
            _check(hello, place, links)
            links[hello["node"]] = link
    return links


def _hello(link: Connection) -> Message | None:
    """What a launcher says first; None from anybody else."""
    with contextlib.suppress(EOFError, OSError, ValueError):
        if link.poll(HELLO_S):
            said = _read(link)
            return said if {"node", "nodes", "ranks"} <= said.keys() else None
    return None


def _check(hello: Message, place: LaunchEnv, links: Mapping[int, Connection]) -> None:
    node = hello["node"]
    for name, value, ours in (("NNODES", hello["nodes"], place.nodes), ("NPROC", hello["ranks"], place.ranks)):
        if value != ours:
            raise ConfigError([ConfigIssue("environment", f"{name} = {value} on node {node}, but {ours} on node 0")])
    if node in (0, *links):
        raise ConfigError(
            [ConfigIssue("environment", f"NODE_RANK = {node} is set on two nodes; each node needs its own")]
        )


def _join(place: LaunchEnv) -> dict[int, Connection]:
    deadline, told = time.monotonic() + JOIN_S, False
    while True:
        try:
            link = _connection(socket.create_connection((place.host, place.port), timeout=HELLO_S))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise NodeLostError(
                    f"node 0 did not answer at {place.host}:{place.port} within {JOIN_S:g} s; check MASTER_ADDR"
                ) from None
            if not told:
                say(f"waiting for node 0 at {place.host}:{place.port} ({error})")
            told = True
            time.sleep(RETRY_S)
    link.send_bytes(json.dumps({"node": place.node, "nodes": place.nodes, "ranks": place.ranks}).encode())
    return {0: link}


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
