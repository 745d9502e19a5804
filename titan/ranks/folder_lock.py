"""The lock of a run's folder: one run writes there at a time, on whichever machine it is.

`lock.json` says who holds the folder, and counts: the holder raises the count every `BEAT_S` seconds. It is made under
another name and linked to its own, which is atomic on NFS and Lustre too; flock is not relied on, and no clock of one
machine is compared with that of another. A start that finds a lock judges its holder:

- One on this machine is alive if that process is: the same boot, pid namespace, pid and time of start.
- Any other one is watched for `WATCH_S`: it is alive if the lock changes meanwhile.
- A lock that names another folder may have come with a copy of that folder. It is watched too, unless its holder is a
  process of this machine that is seen to hold another folder.

A live one refuses the start. A dead one is renamed aside, held against what was judged (of two starts one does that
first), and removed. The count is written in place, into the file that was opened under the name and read: a holder that
was suspended for longer than it takes to be given up writes to what was renamed aside, never over its successor's lock.
One that finds no lock at all puts it back only if it has counted lately: a successor may have come and gone meanwhile.

Used on rank 0 alone; needs no torch.
"""

import errno
import json
import operator
import os
import platform
import re
import secrets
import stat
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from threading import Lock as Mutex
from typing import Any

from titan.errors import FolderError
from titan.log import log

LOCK = "lock.json"

BEAT_S = 10.0  # between two counts of a holder
WATCH_S = 45.0  # how long a lock of another machine is watched: four counts are missed by then
ALONE_S = WATCH_S - BEAT_S  # nobody has given a holder up whose last count is not older than that
LOOK_S = 1.0  # between two looks at a lock that is watched: counted, so that a file system that hangs stops the watch

_LARGEST = 16384  # bytes of a lock that are read
_ASIDE = re.compile(re.escape(LOCK) + r"\.[0-9a-f]{8}", re.ASCII)
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
"""What a file system without hard links answers."""


class FolderLock:
    """The lock of one run's folder, taken once at most. What is never taken is never lost, as on ranks other than 0."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._me = {**_this_process(), "folder": os.path.realpath(folder), "token": secrets.token_hex(16)}
        self._count, self._counted = 0, 0.0
        self._lost = ""
        self._renewing, self._done = Mutex(), Event()
        self._heart: Thread | None = None

    def take(self) -> None:
        """Make the folder if need be, and hold it from now on; FolderError: another run does, and which. OSError: the
        folder cannot be made or written to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        left: bytes | None = None
        while not self._claim(self._content()):
            self._refuse_what_is_no_file()
            found = self._look()
            if found is None:
                continue
            if self._is_mine(found):  # NFS says that it exists when an answer was lost and it asked twice
                break
            if self._is_dead(found):
                left = found
                self._set_aside(partial(operator.eq, found))
        self._counted = time.monotonic()
        self._heart = Thread(target=self._beat, name="lock", daemon=True)
        self._heart.start()
        if left is not None:
            log.info(f"{self.path} {self._left_by(_holder(left))}; taking the lock over")
        self._sweep()

    def check(self) -> None:
        """Look whether the folder is held, before what cannot be undone; FolderError: it is not; OSError: unknown.

        A count that cannot be written, as on a full disk, leaves the folder held; the next beat tells.
        """
        if self._heart is not None:
            self._renew()

    def check_known(self) -> None:
        """As `check`, but by what the last count has found: it costs nothing."""
        if self._lost:
            raise FolderError(self._lost)

    def release(self) -> None:
        """Let go of the folder; harmless where it is not held."""
        heart, self._heart = self._heart, None
        if heart is None:
            return
        self._done.set()
        heart.join(BEAT_S)  # it may hang in a file system that does not answer
        try:
            self._set_aside(self._is_mine)
        except OSError as error:
            failure = f"{self.path} cannot be removed: {error.strerror}"
            log.warning(f"{failure}; the next start of the run takes the lock over")

    def _beat(self) -> None:
        told = False
        while not self._done.wait(BEAT_S):
            try:
                failure = self._renew()
            except FolderError:
                return  # which `check_known` tells
            except OSError as error:
                failure = error
            if failure is not None and not told:
                log.warning(f"{self.path} cannot be renewed: {failure.strerror}; trying again every {BEAT_S:g} s")
                told = True

    def _renew(self) -> OSError | None:
        """Raise the count, if the lock is ours; put it back if somebody has removed it. Returns why it could not be."""
        with self._renewing:
            self.check_known()
            self._count += 1
            try:
                opened = os.open(self.path, os.O_RDWR)
            except FileNotFoundError:
                if not self.folder.is_dir():
                    self._lose("has been removed")
                silent_s = time.monotonic() - self._counted
                if silent_s > ALONE_S:
                    self._lose(f"may have been another run's: its lock is gone, last renewed {silent_s:.0f} s ago")
                if self._claim(self._content()):
                    self._counted = time.monotonic()
                    return None
                opened = os.open(self.path, os.O_RDWR)
            try:
                holder = _holder(os.read(opened, _LARGEST))
                if holder.get("token", self._me["token"]) != self._me["token"]:
                    self._lose(f"is held by another run now, which took this one for dead: {_words(holder)}")
                content = self._content()
                try:
                    os.pwrite(opened, content, 0)
                    os.ftruncate(opened, len(content))
                except OSError as error:
                    return error
            finally:
                os.close(opened)
            self._counted = time.monotonic()
            return None

    def _lose(self, why: str) -> None:
        self._lost = f"{self.folder} {why}; this run stops, and writes nothing more to the folder"
        raise FolderError(self._lost)

    def _is_mine(self, content: bytes) -> bool:
        return bool(_holder(content).get("token") == self._me["token"])

    def _content(self) -> bytes:
        """As long each time, so that it is replaced in place by one write."""
        return json.dumps({**self._me, "count": f"{self._count:012}"}).encode() + b"\n"

    def _is_dead(self, found: bytes) -> bool:
        """Whether the holder of a lock is; one that is alive is a FolderError."""
        holder = _holder(found)
        alive = self._is_alive_here(holder)
        if alive is None:
            now = self._watch(found, holder)
            if now is None or _holder(now).get("token") != holder.get("token"):
                return False  # let go of, or taken over by another, who is judged anew
            alive = now != found
        if alive:
            advice = "wait for it, stop it, or give this run another --run.name"
            raise FolderError(f"{self.folder} is in use by another run: {_words(holder)}; {advice}")
        return True

    def _is_alive_here(self, holder: Mapping[str, Any]) -> bool | None:
        """Whether a holder is alive, and of this folder; None where that cannot be seen."""
        alive, named = _is_alive(holder), str(holder.get("folder", self._me["folder"]))
        return self._holds_this(holder, named) if alive and named != self._me["folder"] else alive

    def _holds_this(self, holder: Mapping[str, Any], named: str) -> bool | None:
        """Whether the folder that a live process of this machine holds is this one; None where that cannot be seen. Its
        path is looked up as the process sees it, which may have mounts of its own. A folder that is mounted twice may
        have two device numbers, so a file tells that is made here, and is there or not."""
        there, probe = Path(f"/proc/{holder['pid']}/root{named}"), self._aside()
        try:
            if _holder(_read(there / LOCK)).get("token") != holder.get("token"):
                return None  # it has moved, or has been let go of
            probe.touch()
            seen = os.path.lexists(there / probe.name)
            return seen or (False if os.path.lexists(probe) else None)  # another start may have swept
        except OSError:
            return None
        finally:
            probe.unlink(missing_ok=True)

    def _left_by(self, holder: Mapping[str, Any]) -> str:
        named = holder.get("folder", self._me["folder"])
        if named == self._me["folder"] or _is_alive(holder) is False:
            return f"was left by {_words(holder)}, which has ended"
        return f"came with a copy of {named}, the folder of {_words(holder)}"

    def _watch(self, found: bytes, holder: Mapping[str, Any]) -> bytes | None:
        """The lock when it changes, or as it stands after `WATCH_S`."""
        log.info(f"{self.path} belongs to {_words(holder)}; waiting {WATCH_S:g} s to see whether that run is alive")
        for _ in range(round(WATCH_S / LOOK_S)):
            time.sleep(LOOK_S)
            if (now := self._look()) != found:
                return now
        return found

    def _look(self) -> bytes | None:
        with suppress(FileNotFoundError):
            return _read(self.path)
        return None

    def _refuse_what_is_no_file(self) -> None:
        """A folder or a link that leads nowhere would be there for ever, and a pipe would never be read."""
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self.path.lstat().st_mode):
                raise FolderError(f"{self.path} is not a file, so it cannot be the lock of a run; remove it")

    def _claim(self, content: bytes) -> bool:
        """Make the lock, all of it at once, if there is none; whether it is this one now."""
        own = self._aside()
        try:
            own.write_bytes(content)
            with suppress(FileExistsError, FileNotFoundError):  # somebody holds it, and may have swept
                self._link(own, content)
                return True
            return False
        finally:
            own.unlink(missing_ok=True)

    def _link(self, own: Path, content: bytes) -> None:
        try:
            os.link(own, self.path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with self.path.open("xb") as file:
                file.write(content)

    def _set_aside(self, meant: Callable[[bytes], bool]) -> None:
        """Remove the lock, if its content is what is meant; another one that comes just then is put back."""
        found = self._look()
        if found is None or not meant(found):
            return
        aside = self._aside()
        try:
            self.path.rename(aside)
            content = aside.read_bytes()
        except FileNotFoundError:  # somebody else was first
            return
        if not meant(content):
            self._claim(content)
        aside.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what killed starts have left: locks of this machine's dead, and torn ones. Whole ones of others may be
        about to be put back."""
        for path in self.folder.iterdir():
            if not _ASIDE.fullmatch(path.name):
                continue
            try:
                holder = _holder(path.read_bytes())
                if not holder or _is_alive(holder) is False:
                    path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning(f"the stale file {path} cannot be removed: {error.strerror}")

    def _aside(self) -> Path:
        return self.path.with_name(f"{LOCK}.{secrets.token_hex(4)}")


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LARGEST)


def _holder(content: bytes) -> dict[str, Any]:
    """What a lock says; nothing where it is torn or empty."""
    with suppress(ValueError):
        if isinstance(holder := json.loads(content), dict):
            return holder
    return {}


def _words(holder: Mapping[str, Any]) -> str:
    if not holder:
        return "an unknown process"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"host {holder.get('host')}, pid {holder.get('pid')}{job}, started {holder.get('since')}"


def _this_process() -> dict[str, Any]:
    job, array = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_ARRAY_JOB_ID", "")
    job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}" if array else job
    process = {"host": platform.node(), "machine": _machine(), "pid": os.getpid(), "process": _process(os.getpid())}
    return {**process, "job": job, "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _machine() -> str:
    """Which machine, and which of its pid namespaces: a name is shared by containers. Empty where it cannot be told."""
    if sys.platform != "linux":
        return f"{platform.node()} {uuid.getnode():x}"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _process(pid: int) -> str:
    """When a process of this machine started, in ticks since its boot; empty where that is not to be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *numbers = stat.rpartition(")")[2].split()
    return "dead" if state in "ZX" else numbers[18]


def _is_alive(holder: Mapping[str, Any]) -> bool | None:
    """Whether a holder is, if it is a process of this machine; None where that cannot be seen."""
    pid = holder.get("pid")
    if not holder.get("machine") or holder["machine"] != _machine() or type(pid) is not int or pid < 1:
        return None
    try:
        with suppress(PermissionError):  # another user's
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    started = _process(pid)
    if not started and holder.get("process"):
        return None  # /proc shows only one's own
    return started == holder.get("process")
