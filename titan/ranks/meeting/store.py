"""The store where the ranks of a run meet: found within a limit, and in time for signals to be heard meanwhile."""

import atexit
import errno
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from titan.errors import ConfigError, RankFailedError
from titan.ranks.meeting import signals

T = TypeVar("T")

LOOK_S = 0.05  # between two looks: whether somebody listens, or native code has returned
LEFT_S = 5.0  # longest wait, at the end of this process, for native code that took too long
RESOLVE_S = 30.0  # longest wait until a host name resolves: that of a pod or a node that boots is known a little later
_opened: dict[tuple[str, int], Store] = {}  # what this process has opened: rank 0 could not listen twice


def in_time(work: Callable[[], T], limit_s: float) -> T:
    """The result of work that blocks in native code, on a thread of its own: this one hears signals meanwhile.

    TimeoutError: it took longer, and the thread is left behind. Whatever the work raises is raised too. The end of the
    process waits for a thread left behind, `LEFT_S` at most: native code that raises while Python ends, aborts it.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    deadline = time.monotonic() + limit_s
    Thread(target=run, daemon=True).start()
    try:
        while not answer.done():
            wait([answer], LOOK_S)
            signals.check()
            if time.monotonic() > deadline and not answer.done():
                raise TimeoutError
    finally:
        if not answer.done():
            atexit.register(wait, [answer], LEFT_S)
    return answer.result(0)


def shared_store() -> Store:
    """The store of the process group of all ranks, which this process has joined."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def check_host(host: str, port: int, limit_s: float = RESOLVE_S) -> None:
    """Wait until the name of a host resolves; ConfigError: it does not within the limit."""
    deadline, why = time.monotonic() + limit_s, "no answer"
    while True:
        try:
            in_time(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), deadline - time.monotonic())
            return
        except (OSError, UnicodeError) as error:  # TimeoutError too
            why = getattr(error, "strerror", None) or why
            if time.monotonic() > deadline:
                what = f"MASTER_ADDR = {host}: this host could not resolve that name within {limit_s:g} s ({why})"
                raise ConfigError(f"{what}; set it to the name or address of node 0", "environment") from None
        signals.check()
        time.sleep(LOOK_S)


def serves_store() -> bool:
    """Whether rank 0 serves the store, and no launcher (titan's or torchrun's)."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def open_store(limit_s: float) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 serves unless a launcher does.

    Raises:
        ConfigError: the host name does not resolve, the port is taken, or what answers there is no store.
        RankFailedError: nobody listens there within the limit.
    """
    given = os.environ.get("MASTER_PORT", "")
    if not (given.isdecimal() and 0 < int(given) < 1 << 16):
        wanted = "must be the port where rank 0 serves the store, from 1 to 65535"
        raise ConfigError(f"MASTER_PORT = {given!r}: {wanted}", "environment")
    host, port = os.environ["MASTER_ADDR"], int(given)
    if (host, port) in _opened:
        return _opened[host, port]
    deadline, serves = time.monotonic() + limit_s, serves_store() and os.environ["RANK"] == "0"
    check_host(host, port, min(RESOLVE_S, limit_s))
    if serves:
        _check_free(port)
    else:
        await_port(host, port, deadline)
    left = max(1.0, deadline - time.monotonic())
    try:
        _opened[host, port] = in_time(lambda: _connect(host, port, serves, left), left + LOOK_S)
        return _opened[host, port]
    except (TimeoutError, RuntimeError) as error:
        why = "" if isinstance(error, TimeoutError) else f" ({str(error).splitlines()[0]})"
        what = f"what listens there did not answer as the store of the ranks{why} within {limit_s:g} s"
        where = f"MASTER_ADDR = {host}, MASTER_PORT = {port}"
        raise ConfigError(f"{where}: {what}; give the run a port that no program has", "environment") from None


def _connect(host: str, port: int, serves: bool, limit_s: float) -> Store:
    limit = timedelta(seconds=limit_s)
    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit, multi_tenant=True)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                advice = "choose a port that no program on the host of rank 0 has"
                raise ConfigError(f"MASTER_PORT = {port}: {error.strerror}; {advice}", "environment") from None


def await_port(host: str, port: int, deadline: float) -> None:
    """Wait until somebody listens. A TCPStore that cannot connect would write a stack trace of C++ to stderr."""
    began, pause = time.monotonic(), LOOK_S
    while True:
        try:
            socket.create_connection((host, port), timeout=max(LOOK_S, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                what = f"rank 0 did not listen at {host}:{port} within {deadline - began:.0f} s ({error})"
                raise RankFailedError(f"{what}; check MASTER_ADDR, MASTER_PORT and rank 0") from None
            signals.check()
            time.sleep(pause)
            pause = min(1.0, 1.2 * pause)  # thousands of ranks knock at one host
