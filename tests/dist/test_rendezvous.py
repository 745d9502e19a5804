"""Launchers of several nodes find together: of one job, among strangers, within limits, and while signals come."""

import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands import free_port
from tests.slurm import executable
from titan.errors import ConfigError, TitanError
from titan.ranks import launcher
from titan.ranks.meeting import rendezvous, signals, store
from titan.ranks.meeting.launch_env import LOCAL, LaunchEnv
from titan.ranks.meeting.rendezvous import Nodes, meet
from titan.ranks.meeting.same_job import APART, Statement
from titan.testing.ranks import run_ranks as in_a_fresh_process

JOB = {"run": {"dir": "/runs", "name": "a"}, "optimizer": {"lr": 0.1}}
OURS = Statement(JOB, {"model llama": "1f"}, {"torch": "2.13.0", "numpy": "2.4.6"})
ADVICE = "; start all nodes with the same config, options and software"


class Meeting:
    """Node 0 in a thread, at a free port; what it hears from each of the others once they have met, or its error."""

    def __init__(self, nodes: int = 2) -> None:
        self.nodes, self.port = nodes, free_port()
        self._heard: list[object] = []
        self._thread = threading.Thread(target=self._gather)
        self._thread.start()

    def _gather(self) -> None:
        try:
            with meet(LaunchEnv(self.nodes, 0, 4, LOCAL, self.port), OURS, 60.0) as others:
                self._heard += [others.hear(node) for node in sorted(others.links)]
        except TitanError as error:
            self._heard.append(str(error))

    @property
    def heard(self) -> list[object]:
        """Waits until it has ended."""
        self._thread.join()
        return self._heard

    def joined(self, node: int, ranks: int = 4, nodes: int = 0, **theirs: Any) -> AbstractContextManager[Nodes]:
        """By a node that states our job, but for what `theirs` changes in it."""
        return meet(LaunchEnv(nodes or self.nodes, node, ranks, LOCAL, self.port), replace(OURS, **theirs), 20.0)

    def assert_met(self, **theirs: Any) -> None:
        """By node 1."""
        with self.joined(1, **theirs) as others:
            others.tell({"ended": []})
            assert self.heard == [{"ended": []}]

    def refused(self, **theirs: Any) -> str:
        """What node 1 is told."""
        with pytest.raises(ConfigError) as error:
            self.joined(1, **theirs).__enter__()
        return str(error.value)


def _call(port: int, data: bytes = b"") -> socket.socket:
    deadline = time.monotonic() + 20.0
    while True:
        try:
            caller = socket.create_connection((LOCAL, port))
            break
        except ConnectionRefusedError:  # node 0 is on its way
            if time.monotonic() > deadline:
                raise
    caller.sendall(data)
    return caller


def _framed(text: bytes) -> bytes:
    return struct.pack("!i", len(text)) + text


def _hello(**changes: Any) -> bytes:
    hello = {"node": 1, "nodes": 2, "ranks": 4, "statement": json.loads(OURS.text)} | changes
    return _framed(json.dumps(hello).encode())


STRANGERS = {
    "nothing": b"",
    "half a length": b"\0\0",
    "half a hello": _hello()[:-7],
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "1 GB": struct.pack("!i", 1 << 30) + b"x" * 1000,
    "less than nothing": struct.pack("!i", -5),
    "more than a hello": _hello() + b"x",
    "no text": _framed(b"\xff\xfe"),
    "a list": _framed(b"[1]"),
    "no job": _framed(b'{"node": 1, "nodes": 2, "ranks": 4}'),
    "words for numbers": _hello(node="1"),
    "a node too many": _hello(node=2),
}


def test_strangers_end_nothing_and_keep_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """All call before the other node does, half of them stay, and they are said once."""
    meeting = Meeting()
    callers = [_call(meeting.port, data) for data in STRANGERS.values()]
    began = time.monotonic()
    for caller in callers[::2]:
        caller.close()
    meeting.assert_met()
    assert time.monotonic() - began < rendezvous.HELLO_S / 2
    for caller in callers:
        caller.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "ignored" in line]
    assert lines == [f"warning: ignored a connection from {LOCAL} that is no launcher of this run"]


def test_a_caller_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.1)
    meeting = Meeting()
    with _call(meeting.port) as caller:
        caller.settimeout(20.0)
        assert caller.recv(1) == b"", "the connection is closed"
    monkeypatch.setattr(rendezvous, "HELLO_S", 10.0)
    meeting.assert_met()


def test_a_node_that_is_gone() -> None:
    meeting = Meeting()
    with meeting.joined(1):
        pass
    assert meeting.heard == ["the launcher of node 1 no longer responds"]


def test_a_node_that_leaves_before_all_have_come_is_waited_for_again(capfd: pytest.CaptureFixture[str]) -> None:
    meeting = Meeting(3)
    with meeting.joined(1):
        pass
    with meeting.joined(1) as one, meeting.joined(2) as two:
        one.tell({"ended": [1]})
        two.tell({"ended": [2]})
        assert meeting.heard == [{"ended": [1]}, {"ended": [2]}]
    assert "node 1 has left; waiting for it again" in capfd.readouterr().err


# --- jobs -------------------------------------------------------------------------------------------------------------


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "NNODES": ({"nodes": 3}, "environment: NNODES = 3 on node 1, but 2 on node 0"),
    "NPROC": ({"ranks": 8}, "environment: NPROC = 8 on node 1, but 4 on node 0"),
    "a key": ({"job": {**JOB, "optimizer": {"lr": 0.2}}}, f"optimizer.lr = 0.2 on node 1, but 0.1 on node 0{ADVICE}"),
    "two keys": (
        {"job": {"run": {**JOB["run"], "seed": 3}}},
        f"run.seed = 3 on node 1, but not set on node 0\noptimizer.lr = not set on node 1, but 0.1 on node 0{ADVICE}",
    ),
    "a plugin": (
        {"plugins": {"model llama": "2f"}},
        f"model llama: its files have the hash 2f on node 1, but 1f on node 0{ADVICE}",
    ),
    "PyTorch": ({"versions": {"torch": "2.11.0"}}, f"PyTorch 2.11.0 on node 1, but 2.13.0 on node 0{ADVICE}"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_nodes_that_do_not_fit_are_refused_on_both(name: str) -> None:
    (theirs, said), meeting = MISFITS[name], Meeting()
    assert meeting.refused(**theirs) == said
    assert meeting.heard == [said]


def test_two_nodes_of_one_number_end_the_run_on_all_nodes() -> None:
    meeting = Meeting(3)
    with meeting.joined(1) as others:
        said = meeting.refused()
        assert meeting.heard == [said]
        assert others.hear(0) == {"end": 2}
    assert said == "environment: NODE_RANK = 1 is set on two nodes; each node needs its own"


def test_a_launcher_of_another_run_is_refused_alone(capfd: pytest.CaptureFixture[str]) -> None:
    meeting = Meeting()
    said = meeting.refused(job={**JOB, "run": {"dir": "/runs", "name": "b"}}).splitlines()
    why = f"another run waits at MASTER_ADDR and MASTER_PORT, {LOCAL}:{meeting.port}; {APART}"
    assert said == [why, "run.name = 'b' on node 1, but 'a' on node 0"]
    meeting.assert_met()
    refused = f"warning: refused node 1 of another run, at {LOCAL} (run.name = 'b' on node 1, but 'a' on node 0)"
    assert refused in capfd.readouterr().err.splitlines()


def test_other_versions_are_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    Meeting().assert_met(versions={"torch": "2.13.1", "numpy": "2.4.6", "torchao": "0.18"})
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert lines == [
        "warning: torch is 2.13.1 on node 1, but 2.13.0 on node 0",
        "warning: torchao is 0.18 on node 1, but not installed on node 0",
    ]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken() -> None:
    with rendezvous.listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"MASTER_PORT = {port}: Address already in use"):
            meet(LaunchEnv(2, 0, 1, LOCAL, port), OURS).__enter__()


def test_nodes_that_do_not_come() -> None:
    place = LaunchEnv(3, 0, 1, LOCAL, free_port())
    with pytest.raises(rendezvous.NodeLostError, match=r"nodes \[1, 2\] did not connect within 0.5 s"):
        meet(place, OURS, 0.5).__enter__()
    with pytest.raises(rendezvous.NodeLostError, match=r"node 0 did not answer at .* within 0.5 s .*check MASTER_ADDR"):
        meet(LaunchEnv(3, 1, 1, LOCAL, place.port), OURS, 0.5).__enter__()


@pytest.mark.parametrize("node", [0, 1])
def test_a_host_name_that_does_not_resolve(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RESOLVE_S", 0.5)
    said = "MASTER_ADDR = no.such.host.invalid: this host could not resolve that name within 0.5 s"
    with pytest.raises(ConfigError, match=said):
        meet(LaunchEnv(2, node, 1, "no.such.host.invalid", free_port()), OURS).__enter__()


@contextmanager
def _listening(answer: bytes) -> Iterator[int]:
    """A program that accepts connections and answers each with these bytes."""
    with socket.create_server((LOCAL, 0)) as server:

        def serve() -> None:
            with suppress(OSError), ExitStack() as callers:
                while True:
                    callers.enter_context(server.accept()[0]).sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", _framed(b"[]")], ids=["", "http", "list"])
def test_what_listens_is_no_launcher(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.5)
    with _listening(answer) as port:
        said = f"MASTER_ADDR = {LOCAL}, MASTER_PORT = {port}: what listens there is no launcher of titan"
        with pytest.raises(ConfigError, match=said):
            meet(LaunchEnv(2, 1, 1, LOCAL, port), OURS).__enter__()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["", "http"])
def test_what_listens_is_no_store(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with _listening(answer) as port:
        monkeypatch.setattr(os, "environ", {"RANK": "1", "MASTER_ADDR": LOCAL, "MASTER_PORT": str(port)})
        with pytest.raises(ConfigError, match=f"MASTER_PORT = {port}: what listens there did not answer"):
            store.open_store(1.0)
        os.environ["RANK"] = "0"
        with pytest.raises(ConfigError, match=f"MASTER_PORT = {port}: Address already in use"):
            store.open_store(1.0)


# --- signals ----------------------------------------------------------------------------------------------------------


def _waits_for_nodes(node: int, number: int, folder: Path) -> tuple[int, str]:
    """A launcher that is sent a signal while it waits, in a job of Slurm's; what it asked Slurm for."""
    executable(folder / "scontrol", f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", SLURM_JOB_ID="41")
    before = rendezvous.say

    def say(line: str) -> None:
        before(line)
        if line.startswith("waiting for"):
            os.kill(os.getpid(), number)

    rendezvous.say = say
    with signals.listening():
        code = launcher.start(lambda words: 0, [], LaunchEnv(2, node, 1, LOCAL, free_port()), OURS)
    asked = folder / "asked"
    return code, asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize(
    ("node", "number", "asked"),
    [(0, signal.SIGUSR1, "requeue 41\n"), (0, signal.SIGTERM, ""), (1, signal.SIGUSR1, "")],
    ids=["requeued", "cancelled", "another node"],
)
def test_a_signal_while_nodes_wait(
    node: int, number: int, asked: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert in_a_fresh_process(_waits_for_nodes, 1, node, number, tmp_path, init=False) == [(75, asked)]
    said = f"preempted by {signal.Signals(number).name} while waiting for other nodes; to go on, run the same command"
    assert said in capfd.readouterr().out
