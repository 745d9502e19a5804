"""Saves and loads a run's state, on all ranks together.

A save has five steps: copy (in the background mode), write under a temporary name, check the files, rename, delete old
checkpoints. All steps after the copy run on one thread per rank and in a separate process group, so that they never mix
with the collectives of training. A failure on one rank ends the save on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from titan.checkpoint import restore, storage, techniques
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import index, manifest
from titan.checkpoint.disk.lineage import MOST_STARTS, Found, Lineage, branch, descends, new_start
from titan.checkpoint.disk.manifest import TECHNIQUES, FileEntry
from titan.checkpoint.disk.plain import shown, write_table
from titan.checkpoint.disk.tensor_file import WORDS
from titan.checkpoint.ranks import RankFailure, Ranks
from titan.checkpoint.restore import Saved
from titan.checkpoint.state import Snapshot, Stacks, Staging, collect, firsts, model_tensors, optimizer_state
from titan.contracts import Mesh, ModelPart
from titan.errors import (
    EXIT_WRONG_INPUT,
    CheckpointError,
    ConfigError,
    FolderError,
    PluginError,
    SaveError,
    UnreadableError,
)
from titan.log import log
from titan.machine import on_this_device
from titan.ranks import watchdog


class Checkpointer:
    """The checkpoints of a run. Every method is called by all ranks, at the same place of the program.

    folder: on a file system that all ranks share.  keep: complete ones kept, 0 for all.
    asynchronous: write in the background, from a copy in host memory as large as a rank's share of the state. A GPU
        with room clones the state, and sends the clone there while it computes.
    timeout_s: a load or save that takes longer ends the process, with its stacks shown.
    copies: name -> content of the tokenizer's files that each checkpoint keeps; read on rank 0.
    held: called on rank 0 before a save changes the folder; raises FolderError where it is no longer this run's.
    mesh: of the run; None: no rank has weights of its own, nor state of techniques.
    """

    def __init__(
        self, folder: Path, *, keep: int, asynchronous: bool, rank: int, world_size: int, timeout_s: float = 1800.0,
        held: Callable[[], None] = lambda: None, mesh: Mesh | None = None, copies: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.keep, self.asynchronous, self.timeout_s = folder, keep, asynchronous, timeout_s
        self._held, self._copies = held, copies or {}
        self._ranks = Ranks(rank, world_size, patience=2 * timeout_s)  # the limit, which shows stacks, comes first
        self._planner = storage.Planner(self._ranks)
        self._staging = Staging()
        self._stacks = Stacks(mesh)
        self._writer: Thread | None = None
        self._failure: Exception | None = None
        self._saved: Saved | None = None
        self._damaged: set[Path] = set()
        self._next: int | None = None
        self._ancestors: Lineage = ()
        self._start = new_start()
        self._sweeper: Thread | None = None

    def find(self, resume: str) -> Path | None:
        """The checkpoint to go on from, verified; None for a start from new weights. Rank 0 looks, all agree.

        resume: "auto", the newest complete one, or an older one where it is damaged; "required", the same, of which
            there has to be one; "never"; or the path of a checkpoint, or of a run or checkpoints folder (its newest).

        Raises:
            ConfigError: "required", and there is none.
            CheckpointError: what has to be there is absent or damaged, or the file system does not give it: an older
                one would then undo what may be sound.
        """
        with self._limit(f"looking for a checkpoint in {self.folder}"):
            candidates, reasons, others = self._ranks.first(lambda: self._candidates(resume))
            if resume == "required" and not candidates and not reasons:
                # The words are agreed on too: an error that is equal on all ranks is printed once.
                folder = self._ranks.first(lambda: str(self.folder))
                raise ConfigError(f'checkpoint.resume = "required": there is no complete checkpoint in {folder}')
            lasting = True
            for path in candidates:
                try:
                    self._saved = Saved.open(path, self._ranks)
                except CheckpointError as error:
                    if resume not in ("auto", "required") or error.unreadable:
                        with folders.named():
                            raise
                    reasons[path] = str(error)
                    lasting = lasting and error.exit_code == EXIT_WRONG_INPUT
                    continue
                self._damaged = set(reasons)
                for damaged, reason in reasons.items():
                    log.warning(
                        f"{reason}. Resuming from {path} instead; the damaged checkpoint is ignored until a save of "
                        f"its step replaces it or `titan checkpoint rm {damaged}` removes it"
                    )
                return path
            if reasons:
                told = "; ".join(reasons.values())
                anew = 'set checkpoint.resume = "never" to start a new run'
                kind = CheckpointError if lasting else UnreadableError
                raise kind(f"no sound checkpoint is left in {self.folder}: {told}{others}; {anew}")
            return None

    def _candidates(self, resume: str) -> tuple[list[Path], dict[Path, str], str]:
        """What to try, first the best; what is damaged and why; what to say of other branches if all is."""
        self._tidy()
        found = folders.survey(self.folder)
        self._next = folders.next_serial(self.folder)
        if resume in ("auto", "required"):
            folders.refuse_in_doubt(found)
            self._tell_abandoned(found, branch(found))
            damaged = {each.path: each.fault for each in found if each.fault}
            return folders.sound(branch(found))[::-1], damaged, folders.on_other_branches(found)
        chosen = None if resume == "never" else folders.choose(resume)
        with folders.named():
            lineage = () if chosen is None else folders.read_state(chosen)["lineage"]
        self._tell_abandoned(found, [each for each in found if descends(lineage, each)])
        return [] if chosen is None else [chosen], {}, ""

    def _tell_abandoned(self, found: Sequence[Found], kept: Sequence[Found]) -> None:
        """Say which checkpoints this run does not go on from. kept: the one that it does, and that one's ancestors."""
        others = ", ".join(path.name for path in folders.sound(each for each in found if each not in kept))
        until = f", until {self.keep} are saved after them" if self.keep else ""
        stay = f"kept until a save replaces their step{until}"
        if others and branch(found)[-1:] == [*kept][-1:]:
            rm = f"`titan checkpoint rm {self.folder} --abandoned` removes them"
            log.info(f"abandoned: {others} in {self.folder}; {stay}, or {rm}")
        elif others:  # until then the newest, and what it goes on from, is not what this run goes on from
            log.warning(f"the first save abandons {others} in {self.folder}; {stay}")

    def load(
        self, path: Path, parts: Sequence[ModelPart], optimizer: torch.optim.Optimizer,
        states: Mapping[str, Any] | None = None, changed: Sequence[str] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Read weights and optimizer state in place, for any layout; returns the rest as it was given to `save`.

        states: what techniques hold now, by name. Of the table `techniques` theirs alone comes back, a tensor to the
            ranks that name it here, as a DTensor where it is one here, and to all where none names it; None: all of it.
            Other tensors of the rest come back on the CPU, whole.
        changed: keys with both values, named where the optimizer's state does not fit.

        Raises:
            CheckpointError: it is damaged, cannot be read, or does not fit the model or the optimizer; no run goes on.
        """
        self.wait()
        with self._limit(f"loading the checkpoint {path}"):
            verified, self._saved = self._saved, None
            saved = verified if verified is not None and verified.path == path else Saved.open(path, self._ranks)
            self._ancestors, self._start = saved.state["lineage"], new_start()
            if (saved_on := shown(saved.state["torch"])) != str(torch.__version__):
                effect = f"this run has {torch.__version__}, so numbers may differ in their last digits"
                log.info(f"checkpoint: it was saved on PyTorch {saved_on}; {effect}")
            rest: dict[str, Any] = restore.load(saved, parts, optimizer, self._ranks, states, self._stacks, changed)
        return rest

    def check(self, parts: Sequence[ModelPart], optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> None:
        """Raise a PluginError for state that cannot be saved, before a save does."""
        slots, _ = optimizer_state(parts, optimizer)
        self._stacks.check(states)
        tensors = firsts(model_tensors(parts)) | slots | techniques.tensors_in(states, self._ranks.rank)
        for name, tensor in tensors.items():
            if tensor.dtype not in WORDS:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in WORDS)
                raise PluginError(f"{name} is of {tensor.dtype}; a checkpoint can hold {known}")

    def save(
        self, step: int, parts: Sequence[ModelPart], optimizer: torch.optim.Optimizer, rest: Mapping[str, Any]
    ) -> None:
        """Save the state after a step; in the background mode it returns when the state is copied, or being cloned.

        rest: tables, lists, strings, numbers and tensors, the same on every rank but for `Own` tables and the table
            `techniques`, of which each rank gives what it has (`titan.checkpoint.techniques`).

        Raises:
            CheckpointError: this save failed, or the one before it that went on in the background.
            PluginError: there is state that cannot be saved.
        """
        self.wait()
        began = time.perf_counter()
        snapshot = collect(parts, optimizer, rest, self._ranks.rank, self._stacks)
        what = f"saving step {step} to {self.folder}"
        if not self.asynchronous:
            with self._limit(what):
                self.write(step, snapshot, began)
            return
        copy, finish = self._staging.copy(snapshot)

        def write_aside() -> None:
            try:
                finish()
                with self._limit(what):
                    self.write(step, copy, began)
            except Exception as failure:
                self._failure = failure

        # A daemon, so that a run that dies of something else does not wait for it: an unfinished save is no loss.
        self._writer = Thread(target=on_this_device(write_aside), name="checkpoint", daemon=True)
        self._writer.start()

    def connect(self) -> None:
        """Connect the ranks before any of them can be lost, where the others are to notice that at once."""
        self._ranks.connect()

    def go_on_with(self, ranks: Sequence[int]) -> None:
        """Go on with these ranks alone, each of which calls this. A save that failed for want of others is told."""
        try:
            self.wait()
        except CheckpointError as failure:
            log.warning(str(failure))
        self._ranks.go_on_with(ranks)
        self._ranks.first(self._tidy)

    def _tidy(self) -> None:
        self._end_removal()
        self._held()
        folders.tidy(self.folder)

    def wait(self) -> None:
        """Return when no save is in flight; raises the CheckpointError of one that failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Let what is in flight end. A failure nobody has waited for is told, not raised: the run ends anyway."""
        try:
            self.wait()
        except CheckpointError as failure:
            log.error(str(failure))
        with self._limit(f"removing old checkpoints from {self.folder}"):
            self._end_removal()

    def _end_removal(self) -> None:
        """Wait until old checkpoints are gone; on rank 0 where others wait for it too, or nobody does."""
        if self._sweeper is not None:
            self._sweeper.join()
            self._sweeper = None

    def _limit(self, what: str) -> AbstractContextManager[None]:
        return watchdog.limit(self.timeout_s, "[comm] checkpoint_timeout_s", what)

    def write(self, step: int, snapshot: Snapshot, began: float) -> None:
        """Write a snapshot and commit it. began: by `perf_counter`. Raises a SaveError where some rank fails."""
        ranks = self._ranks
        try:
            everyone = ranks.gather_first(ranks.each(lambda: techniques.given(snapshot)))
            tables = ranks.each(lambda: techniques.united(everyone))
            path = ranks.first(lambda: self._begin(step))
            names = self._planner.choose(snapshot.tensors)
            written = ranks.each(lambda: storage.write(path, ranks.rank, names, snapshot.tensors, snapshot.local))
            entries = dict(chain(*(each.items() for each in ranks.gather_first(written))))
            values = dict(chain(*(each.items() for each in ranks.gather_first(snapshot.values))))
            rest = {**snapshot.rest, TECHNIQUES: tables} if tables else snapshot.rest
            united = replace(snapshot, values=values, rest=rest)
            ranks.first(lambda: self._commit(path, step, united, entries, began))
        except RankFailure as failure:
            told = self._give_up_together(step, str(failure), failure.disk_full)
            raise SaveError(told, failure.exit_code) from failure
        except RuntimeError as error:  # torch's word for a rank that died or is late
            ranks.leave()
            raise SaveError(f"saving step {step} to {self.folder} failed: {_first_line(error)}") from error

    def _lineage(self, step: int) -> Lineage:
        return [*self._ancestors, (self._start, step)][-MOST_STARTS:]

    def _begin(self, step: int) -> Path:
        self._end_removal()
        self._held()
        return folders.begin(self.folder, step)

    def _commit(self, path: Path, step: int, snapshot: Snapshot, entries: dict[str, FileEntry], began: float) -> None:
        unseen = [fault for name, fault in manifest.wrong_sizes(path, entries).items() if name in entries]
        if unseen:
            share = "put [run] dir on a file system that all ranks share"
            raise SaveError(f"rank 0 does not see {unseen[0]}, which another rank wrote; {share}")
        self._held()
        assert self._planner.plan is not None
        entries[manifest.INDEX] = index.write(path / manifest.INDEX, self._planner.plan.index)
        serial = max(folders.next_serial(self.folder), self._next or 1)
        if self._next is not None and serial > self._next:  # a successor has come and gone while it was suspended
            raise FolderError(f"another run has saved to {self.folder} in the meantime; this run stops")
        self._next = serial
        origin = {"serial": serial, "lineage": self._lineage(step)}
        write_table(path / manifest.STATE, {
            "format": folders.FORMAT, "step": step, **origin, "world_size": self._ranks.size,
            "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "torch": torch.__version__,
            "optimizer": snapshot.optimizer, "values": snapshot.values, "rest": snapshot.rest,
        })  # fmt: skip
        others = (manifest.STATE, *folders.write_copies(path, self._copies))
        entries |= {name: manifest.entry_of(path / name) for name in others}
        manifest.write(path, entries, origin)
        size = sum(entry.size for entry in entries.values()) / 1e6
        self._held()
        self._next = serial + 1  # before: a commit that fails in its last sync has happened
        final = folders.commit(path)
        log.info(f"checkpoint: step {step} saved to {final} in {time.perf_counter() - began:.1f} s, {size:,.1f} MB")
        self._damaged.discard(final)
        try:
            doomed = [*folders.retain(self.folder, self.keep, self._damaged)]
        except (OSError, UnreadableError) as error:
            log.warning(f"an old checkpoint could not be removed: {error}")
            return
        # Aside: to remove as many bytes as were written takes a fifth of the time of the save.
        sweeper = Thread(target=lambda: [*map(folders.sweep, doomed)], name="old checkpoints", daemon=True)
        sweeper.start()
        self._sweeper = sweeper

    def _give_up_together(self, step: int, reason: str, full: bool) -> str:
        """Remove what was written, on rank 0; returns what all ranks tell, also where that fails."""
        failed = f"saving step {step} to {self.folder} failed: {reason}"

        def give_up() -> str:
            """In a folder that is still this run's."""
            try:
                self._tidy()
            except FolderError:
                return failed
            survey = folders.survey(self.folder, sizes=False)
            found = folders.sound(each for each in survey if descends(self._lineage(step), each))
            last = f"the last complete checkpoint is {found[-1]}" if found else "there is no complete checkpoint yet"
            return f"disk full while saving step {step} to {self.folder}; {last}" if full else f"{failed}; {last}"

        try:
            return self._ranks.first(give_up)
        except RankFailure as failure:
            then = f"sweeping failed: {failure}"
        except RuntimeError as error:
            self._ranks.leave()
            then = f"another rank was lost: {_first_line(error)}"
        return f"{failed}; then {then}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
