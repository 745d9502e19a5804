"""How the data path starts processes."""

import multiprocessing
from multiprocessing.context import BaseContext


def context() -> BaseContext:
    """A fork of a process that has threads of its own (collectives, CUDA) may hang, so children are forked from a small
    server that has none, where the system can; it imports what they need once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["titan.data.samples", "titan.data.tokenize"])
    return server
