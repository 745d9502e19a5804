"""The start method and environment of the processes that tokenize and load data."""

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from threading import Thread

from titan.paths import check_python, shorten_sockets
from titan.ranks.meeting.signals import SIGNALS


def context() -> BaseContext:
    """A fork of a process that has threads of its own (collectives, CUDA) may hang, so children are forked from a small
    server that has none, where the system can; it imports what they need once. They do not hear the signals by which a
    run is preempted, and which Slurm sends to every process: the run goes on until it has saved, and needs them."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    check_python()
    shorten_sockets()
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["titan.data.samples.samples", "titan.data.tokens.tokenize"])
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):  # the first one's start unblocks some
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return server


def end_with_parent(_worker: int = 0) -> None:
    """In a child: end when the process that asked for it is gone, however it went. The server is its parent by pid."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
