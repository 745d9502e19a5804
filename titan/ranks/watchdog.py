"""Ends a run that hangs, and shows where: the stacks of every rank, and the last collectives that each entered.

Three kinds of hang are handled. A load or save gets a time limit here (`limit`): a hung file system raises nothing and
is in no collective, so no other timeout would ever end it. A collective that waits too long fails by the timeout of its
process group; the flight recorder holds what each rank was in (`record_collectives`, `keep_recording`). A rank that
hangs outside of collectives is asked for its stacks by the launcher, once its peers have failed (`answer_to_quit`).

Cost: one sleeping thread while a checkpoint is loaded or saved; the recorder keeps 2000 collectives, about 1 MB.
Limits: a thread that holds Python's lock for good keeps `limit` from firing; signals still show its stack.
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, Timer

from titan.errors import EXIT_FAILED
from titan.log import log

# From the stacks to the end: peers whose limit ends a little later show theirs. The launcher leaves them more time.
LINGER_S = 5.0
_STDERR = 2
_NCCL_WRITES = "TORCH_FR_DUMP_TEMP_FILE"


class _Home:
    rank = 0
    logs: Path | None = None


def answer_to_quit() -> None:
    """On SIGQUIT, write the stacks of all threads to stderr and go on; works in a hung native call too."""
    faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True, chain=False)


def record_collectives(rank: int, logs: Path, nccl: bool) -> None:
    """Have PyTorch's flight recorder on, before the first process group is made; the environment's own values stay.
    NCCL's watchdog writes its part when a collective times out; Gloo's is for `keep_recording` to write."""
    _Home.rank, _Home.logs = rank, logs
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives
    if nccl:
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault(_NCCL_WRITES, str(logs / "flight-nccl-rank-"))


def recorder() -> str:
    """Where NCCL's flight recorder writes, and what reads it; empty where NCCL is not recorded."""
    written = os.environ.get(_NCCL_WRITES)
    return f"to {written}N when a collective hangs; read by {_reader(Path(written))}" if written else ""


@contextmanager
def limit(seconds: float, key: str, what: str) -> Iterator[None]:
    """End this process, its stacks shown, if the body takes longer than `seconds`.
    what: is under way, as in "loading x".  key: of the job, where the limit stands."""
    timer = Timer(seconds, _end, (f"{what} took longer than {seconds:g} s ({key})",))
    timer.name, timer.daemon = "watchdog", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(why: str) -> None:
    # A thread of its own writes: stderr or the log may hang as well, on the same file system, and the end must come.
    Thread(target=_tell, args=(why,), name="watchdog's words", daemon=True).start()
    time.sleep(LINGER_S)
    os._exit(EXIT_FAILED)


def _tell(why: str) -> None:
    kept = None if _Home.logs is None else _Home.logs / f"rank-{_Home.rank}.log"
    where = "follow" if kept is None else f"follow, and are in {kept}"
    with tempfile.TemporaryFile() as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)  # reads no source, which may lie on what hangs
        stacks.seek(0)
        shown = stacks.read().decode(errors="replace")
    text = f"error: {why}; the stacks of rank {_Home.rank} {where}\n{shown}\n"
    os.write(_STDERR, text.encode())
    if kept is not None:
        with kept.open("a", encoding="utf-8") as file:
            file.write(text)
    keep_recording()


def keep_recording() -> None:
    """Write the last collectives that this rank entered over Gloo beside its log, and say where, if there are any."""
    if _Home.logs is None:
        return
    import torch.distributed.distributed_c10d as c10d
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

    recording = pickle.loads(_dump_fr_trace())
    if not recording.get("entries"):
        return
    # Who is in each group: the recorder does not note it for Gloo, and its reader needs it.
    ranks_of = {group: str(c10d.get_process_group_ranks(group)) for group in c10d._world.pg_map}
    recording["pg_config"] = {
        group.group_name: {"name": group.group_name, "desc": group.group_desc, "ranks": ranks}
        for group, ranks in ranks_of.items()
    }
    path = _Home.logs / f"flight-gloo-rank-{_Home.rank}"
    path.write_bytes(pickle.dumps(recording))
    log.error(f"the last collectives of rank {_Home.rank} are in {path}; {_reader(path)} compares those of all ranks")


def _reader(path: Path) -> str:
    prefix = path.name.rstrip("0123456789")
    return f"`torchfrtrace --allow-incomplete-ranks --prefix {prefix} {path.parent}`"
