"""Saves and loads a run's state, on all ranks together.

A save goes: copy (in the background mode), write aside, check that all is there, rename, drop what is no longer kept.
Everything after the copy happens on one thread per rank, over a process group of its own, so that the collectives of
training and of the checkpoint never meet; a failure on one rank ends the save on all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from titan.checkpoint import folder as folders
from titan.checkpoint.ranks import RankFailure, Ranks
from titan.checkpoint.state import Snapshot, Staging, collect
from titan.errors import CheckpointError
from titan.log import log

if TYPE_CHECKING:
    from titan.contracts import Part


class Checkpointer:
    """The checkpoints of a run. Every method is called by all ranks, at the same place of the program.

    folder: where they stand, on a file system that all ranks share.  keep: complete ones kept, 0 for all.
    asynchronous: write in the background, from a copy in host memory as large as a rank's share of the state.
    """

    def __init__(self, folder: Path, *, keep: int, asynchronous: bool, rank: int, world_size: int) -> None:
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self._ranks = Ranks(rank, world_size)
        self._staging = Staging()
        self._writer: Thread | None = None
        self._failure: Exception | None = None

    def find(self, resume: str) -> Path | None:
        """The checkpoint to go on from; None for a start from new weights. Rank 0 looks, all agree.

        resume: "auto", the newest complete one if there is any; "must", the same but it has to be there; "never"; or a
            path: a checkpoint, or a run or checkpoints folder whose newest is meant.

        Raises:
            CheckpointError: what has to be there is absent or incomplete.
        """
        return self._ranks.first(lambda: self._find(resume))

    def _find(self, resume: str) -> Path | None:
        folders.tidy(self.folder)
        own = folders.complete(self.folder)
        newest = own[-1] if own else None
        if resume == "must" and newest is None:
            raise CheckpointError(f'checkpoint.resume = "must": there is no complete checkpoint in {self.folder}')
        if resume in ("auto", "must"):
            return newest
        chosen = None if resume == "never" else folders.choose(resume)
        if newest is not None and (chosen is None or chosen.resolve() != newest.resolve()):
            log.warning(f"checkpoint.resume = {resume!r} leaves aside {newest}, the newest of this run")
        return chosen

    def load(self, path: Path, parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Read weights and optimizer state in place, for any layout; returns the rest as it was given to `save`.

        Tensors of the rest come back on the CPU, whole.

        Raises:
            CheckpointError: it cannot be read, or does not fit the model or the optimizer; nothing runs on from there.
        """
        from titan.checkpoint import restore

        self.wait()
        rest: dict[str, Any] = restore.load(path, parts, optimizer, self._ranks)
        return rest

    def save(self, step: int, parts: Sequence[Part], optimizer: torch.optim.Optimizer, rest: Mapping[str, Any]) -> None:
        """Save the state after a step. In the background mode it returns when the state is copied.

        rest: tables, lists, strings, numbers and tensors, the same on every rank but for `Own` tables.

        Raises:
            CheckpointError: this save failed, or the one before it that went on in the background.
        """
        self.wait()
        began = time.perf_counter()
        snapshot = collect(parts, optimizer, rest, self._ranks.rank)
        if not self.asynchronous:
            self._write(step, snapshot, began)
            return
        snapshot = self._staging.copy(snapshot)
        # A daemon, so that a run that dies of something else does not wait for it: an unfinished save is no loss.
        self._writer = Thread(target=self._write_aside, args=(step, snapshot, began), name="checkpoint", daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Return when no save is in flight.

        Raises:
            CheckpointError: the one that was failed.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Let a save in flight end. A failure nobody has waited for is told, not raised: the run ends anyway."""
        try:
            self.wait()
        except CheckpointError as failure:
            log.error(str(failure))

    def _write_aside(self, step: int, snapshot: Snapshot, began: float) -> None:
        try:
            self._write(step, snapshot, began)
        except Exception as failure:
            self._failure = failure

    def _write(self, step: int, snapshot: Snapshot, began: float) -> None:
        from titan.checkpoint import storage

        ranks = self._ranks
        try:
            path = ranks.first(lambda: folders.begin(self.folder, step))
            ranks.each(lambda: storage.write(path, snapshot.tensors, snapshot.local, ranks.group))
            values = {name: value for one in ranks.gather(dict(snapshot.values)) for name, value in one.items()}
            ranks.first(lambda: self._commit(path, step, snapshot, values, began))
        except RankFailure as failure:
            told, full = str(failure), failure.disk_full
            raise CheckpointError(ranks.first(lambda: self._give_up(step, told, full))) from failure
        except RuntimeError as error:  # torch's word for a rank that died or is late
            said = str(error).partition("\n")[0]
            raise CheckpointError(f"saving step {step} to {self.folder} failed: {said}") from error

    def _commit(self, path: Path, step: int, snapshot: Snapshot, values: Mapping[str, Any], began: float) -> None:
        from titan.checkpoint import storage

        absent = storage.absent_files(path)
        if absent:
            raise CheckpointError(f"rank 0 does not see {absent[0]} in {path}: all ranks must share its file system")
        folders.write_state(path, {
            "format": folders.FORMAT, "step": step, "serial": folders.next_serial(self.folder),
            "world_size": self._ranks.size, "torch": torch.__version__, "optimizer": snapshot.optimizer,
            "values": values, "rest": snapshot.rest,
        })  # fmt: skip
        size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
        final = folders.commit(path)
        log.info(f"checkpoint: step {step} saved to {final} in {time.perf_counter() - began:.1f} s, {size:,.1f} MB")
        try:
            folders.retain(self.folder, self.keep)
        except OSError as error:
            log.warning(f"an old checkpoint could not be removed: {error}")

    def _give_up(self, step: int, told: str, full: bool) -> str:
        """Remove what was written; returns what to tell."""
        folders.tidy(self.folder)
        found = folders.complete(self.folder)
        last = f"the last complete checkpoint is {found[-1]}" if found else "there is no complete checkpoint yet"
        if full:
            return f"disk full while saving step {step} to {self.folder}; {last}"
        return f"saving step {step} to {self.folder} failed: {told}; {last}"
