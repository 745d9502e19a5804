"""The rank, device and process group of this process.

All ranks come together at the store before they make a group, and compare their jobs there. They look, instead of
waiting in native code: so they hear signals, and learn at once of a rank that has failed.
"""

import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, Store

from titan import log
from titan.config import Job
from titan.contracts.base.mesh import Mesh, made_when_used
from titan.errors import EXIT_DONE, EXIT_FAILED, ConfigError, RankFailedError, TitanError
from titan.machine import let_segments_expand, raise_descriptor_limit, total_gib
from titan.ranks import failure, watchdog
from titan.ranks.meeting import signals
from titan.ranks.meeting.launch_env import STARTED, launched_world_size
from titan.ranks.meeting.same_job import APART, Statement, misfits, other_run, refusal, remarks, statement_of
from titan.ranks.meeting.store import open_store, shared_store
from titan.terminal import say

LOOKS_PER_S = 5000  # most looks of all ranks together at the store, which answers some ten thousand
_meetings = itertools.count()
_JOB, _ARRIVED, _VERDICT, _ALL = "job", "arrived", "verdict", "all"


@dataclass(frozen=True)
class Rank:
    """A rank of the run and its device."""

    number: int
    world_size: int
    local: int
    device: torch.device


def join(job: Job, **options: Any) -> Rank:
    """Take this process's place: choose its device and enter the process group.

    options: of a command that uses the job; the same on all ranks, as the job is.
    ConfigError: the job asks for a device this machine does not have; or ranks state different jobs, on all ranks.
    """
    rank = here(job.run.device)
    if job.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, before its first use
        torch.use_deterministic_algorithms(True)
    # A rank whose collective is late has NCCL's recorders write, and then ends its process: those of all ranks up to
    # PyTorch 2.14, from 2.15 on each rank's own.
    nccl = rank.device.type == "cuda" and not job.keeps_own_pace
    watchdog.record_collectives(rank.number, job.folder / "logs", nccl=nccl)
    statement = statement_of(job, rank.device.type, **options) if rank.world_size > 1 else None
    enter(rank, job.comm.init_timeout_s, statement)
    if rank.device.type == "cuda" and (gpu := gpu_identity(torch.cuda.get_device_properties(rank.device))):
        claim(f"{socket.gethostname()} {gpu}", rank.number, shared_store())
    return rank


def gpu_identity(properties: Any) -> str:
    """What tells a GPU from others of its host. Slices of one (MIG) share a place on the bus, some AMD GPUs a UUID."""
    keys = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
    return " ".join(str(getattr(properties, key)) for key in keys if hasattr(properties, key))


def here(wanted: str) -> Rank:
    """Which rank this process is. Its device, "cpu", "cuda" or what "auto" finds, is the current one from now on;
    ConfigError: this machine has none."""
    number, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    rank = Rank(number, launched_world_size(), local, _device(wanted, local))
    if rank.device.type != "cpu":
        let_segments_expand()
        torch.accelerator.set_device_index(rank.device.index)
    return rank


def smallest_memory_gib(rank: Rank) -> float | None:
    """Memory of the smallest GPU of all ranks, in GiB, by one all-reduce from host memory; None: ranks on CPUs share
    it."""
    mine = total_gib(rank.device)
    if mine is None or rank.world_size == 1:
        return mine
    least = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)


def claim(device: str, rank: int, store: Store) -> None:
    """Take a device for this rank alone, by a name that only ranks that see it have; ConfigError: another rank has."""
    holder = int(store.compare_set(f"device {device}", "", str(rank)))
    if holder != rank:
        advice = "let each see its own GPU (srun --gpus-per-task=1) or all GPUs of the node"
        why = f"ranks {holder} and {rank} were given the same GPU ({device})"
        raise ConfigError(f"{why}; start one task per GPU, and {advice}")


def enter(rank: Rank, timeout_s: float, statement: Statement | None = None) -> None:
    """Join the process group of all ranks.

    timeout_s: longest wait for the other ranks, and of collectives.  statement: of the job, which all must have.

    Gloo connects two ranks when they first exchange data, not all ranks with all ranks at once: a group of N ranks
    would otherwise open N - 1 sockets per rank, and publish and read N addresses per rank through the store.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is wrong, or ranks state different jobs.
        RankFailedError: another rank has failed before it came here, or has not come.
    """
    raise_descriptor_limit()
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    complete_in_order()
    on_cpu = rank.device.type == "cpu"
    backend, options = ("gloo", None) if on_cpu else (f"cpu:gloo,{rank.device.type}:nccl", made_when_used())
    timeout = timedelta(seconds=timeout_s)
    store: Store = HashStore()
    if rank.world_size > 1 and (missing := [name for name in ("RANK", "MASTER_ADDR") if not os.environ.get(name)]):
        why = f"{' and '.join(missing)} not set, but WORLD_SIZE = {rank.world_size}"
        raise ConfigError(f"{why}; every rank needs both", "environment")
    if {"RANK", "MASTER_ADDR"} <= os.environ.keys():  # MASTER_ADDR alone: the only rank of a run, on a cluster
        began = time.monotonic()
        store = PrefixStore(failure.attempt(), open_store(timeout_s))
        try:
            assemble(store, rank.number, rank.world_size, timeout_s - (time.monotonic() - began), statement)
        except RuntimeError as error:
            raise RankFailedError(f"the store of the ranks is gone ({str(error).splitlines()[0]})") from error
    number, count = rank.number, rank.world_size
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timeout, pg_options=options)


def assemble(store: Store, rank: int, world_size: int, limit_s: float, statement: Statement | None = None) -> None:
    """Wait until all ranks are there and none states another job than rank 0. statement: None on all: no comparison.

    Raises:
        ConfigError: a rank states another job, on all ranks; or what meets there is another run, on this one alone.
        RankFailedError: a rank has failed, or they are not all there within the limit.
    """
    store = PrefixStore(f"meeting {next(_meetings)}", store)  # a process may meet the others more than once
    if rank == 0:
        store.set(_JOB, "" if statement is None else statement.text)
    began, compared, pause = time.monotonic(), False, max(0.005, 3 * world_size / LOOKS_PER_S)
    while True:
        if not compared and store.check([_JOB]):
            compared = True
            _compare(store, rank, statement)
            token = uuid4().hex
            if store.compare_set(f"here {rank}", "", token).decode() != token:
                failure.be_silent()
                why = f"RANK = {rank} is set in two processes, or a former process of this rank has met here"
                raise RankFailedError(why)
            if store.add(_ARRIVED, 1) == world_size:
                store.compare_set(_VERDICT, "", _ALL)
        if store.check([_VERDICT]):
            break
        if (absent := failure.first(store)) is not None:
            raise RankFailedError(f"rank {absent} failed before all ranks of the run had met")
        signals.check()
        if time.monotonic() - began > limit_s:
            raise RankFailedError(_missing(store, rank, world_size, limit_s))
        time.sleep(max(pause, min(1.0, (time.monotonic() - began) / 10)))
    if (verdict := store.get(_VERDICT).decode()) != _ALL:
        raise ConfigError(json.loads(verdict))


def _compare(store: Store, rank: int, ours: Statement | None) -> None:
    """Hold this rank's statement against that of rank 0; the first misfit is the verdict for all ranks."""
    text = store.get(_JOB).decode()
    if ours is None or text == ours.text:
        return
    theirs = Statement.read(json.loads(text))
    sentences = misfits(ours, theirs, f"rank {rank}", "rank 0")
    if other_run(ours, theirs):
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        failure.be_silent()  # that run is not to hear of this one's failure
        raise ConfigError(f"another run meets at MASTER_ADDR and MASTER_PORT, {where} ({sentences[0]}); {APART}")
    if sentences:
        store.compare_set(_VERDICT, "", json.dumps(str(refusal(sentences))))
    if os.environ.get("LOCAL_RANK") == "0" and STARTED not in os.environ:  # else titan's launcher has said it
        for sentence in remarks(ours, theirs, f"rank {rank}", "rank 0"):
            say(f"warning: {sentence}")


def _missing(store: Store, rank: int, world_size: int, limit_s: float) -> str:
    # Rank 0 looks for each; the others do not, so that the store is asked few questions.
    if rank:
        return f"not all {world_size} ranks came within {limit_s:.3g} s (comm.init_timeout_s); rank 0 says which"
    absent = [str(number) for number in range(world_size) if not store.check([f"here {number}"])]
    listed = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    return f"of {world_size} ranks, {listed} did not come within {limit_s:.3g} s (comm.init_timeout_s)"


_Gloo: Any = ProcessGroupGloo
_make_gloo = _Gloo.__init__


def complete_in_order() -> None:
    """Give every Gloo group made from now on one worker thread, which completes its collectives in order of issue.

    PyTorch gives a group two. Both write the name of the collective that they completed last into one string, without
    a lock and with the flight recorder off too (2.11 to 2.15). The gathers of tensor parallelism have a name that does
    not fit into the string itself: when a reduction completes at the same time, one thread frees the memory that the
    other writes to, and the rank dies at some later allocation ("malloc(): unaligned tcache chunk detected").
    """
    _Gloo.__init__ = _make_with_one_worker


def _make_with_one_worker(group: Any, store: Store, rank: int, size: int, options: Any = None, **settings: Any) -> None:
    """What PyTorch makes of these settings, or of options, but for the number of threads.

    AttributeError: a setting that is no option. Left to PyTorch, such a group would have two threads again.
    """
    if options is None:
        options = _Gloo._Options()
        interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces]
        options._devices = devices or [ProcessGroupGloo.create_default_device()]
        for name, value in settings.items():
            setattr(options, "_timeout" if name == "timeout" else name, value)
    options._threads = 1
    _make_gloo(group, store, rank, size, options)


def _device(wanted: str, local: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = f'[run] device = "{wanted}": PyTorch finds no such device on this machine'
        raise ConfigError(f'{why}; use "cpu" or "auto"')
    count = torch.cuda.device_count()
    if count == 1:
        return torch.device("cuda", 0)  # a scheduler may show each task its own GPU only; `claim` finds a shared one
    if local >= count:
        why = f"local rank {local} has no GPU: this process sees {count}"
        raise ConfigError(f"{why}; start at most {count} ranks per node (NPROC)")
    return torch.device("cuda", local)


def set_timeouts(mesh: Mesh, timeout_s: float) -> None:
    """Set the longest wait of the collectives of training: long for a compiler at work, then short, to end a hang.
    Groups of a mesh do not inherit that of all ranks: PyTorch gives NCCL's its own default."""
    assert dist.group.WORLD is not None
    for group in (dist.group.WORLD, *(group for _, group in mesh.groups())):
        group.set_timeout(timedelta(seconds=timeout_s))


class _Peers:
    lost = False


def lose_peers() -> None:
    """Note that the run goes on without some ranks, for which NCCL would wait when this one leaves."""
    _Peers.lost = True


def leave() -> None:
    """Destroy the default process group, if this process has joined one; see `failure.let_others_ask`."""
    failure.let_others_ask()
    if not dist.is_initialized():
        return
    if _Peers.lost and torch.cuda.is_available():
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def run_as_rank(work: Callable[[int], int | None]) -> int:
    """Do what a command does on each rank, report an error, and return the exit code. work: is given the number of this
    rank, and returns an exit code, or None where all is done."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        return work(rank) or EXIT_DONE
    except TitanError as error:
        failure.report(error, rank)
        return error.exit_code
    except KeyboardInterrupt:
        log.log.warning("interrupted")
        return EXIT_FAILED
    except Exception as error:
        failure.tell(error, rank)
        watchdog.keep_recording()
        return EXIT_FAILED
    finally:
        leave()
