"""How ranks keep pace: all make each step together, or workers keep their own, and meet where the run pauses.

A run pauses where all ranks do something together: they validate, save, or end. All that workers at their own pace need
of the host is here, the loss of a worker included; what they do when they meet is their technique's.
"""

from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store

from titan.checkpoint import Checkpointer
from titan.contracts import BuildContext, Mesh
from titan.log import log
from titan.ranks import failure
from titan.ranks.meeting.store import shared_store
from titan.ranks.preemption import Preemption
from titan.ranks.process import lose_peers, set_timeouts
from titan.training.metrics import Meter


class Together:
    """All ranks make each step together."""

    def __init__(self, context: BuildContext, meter: Meter, checkpointer: Checkpointer | None) -> None:
        self._context, self._meter, self._checkpointer = context, meter, checkpointer
        self._remaining: dist.ProcessGroup | None = None  # for tensors in host memory; None: all ranks are there

    def begin(self, step: int) -> Preemption:
        """Training begins after `step` steps. Returns what is asked around each of them whether the run is to stop."""
        return Preemption(self._context.mesh.layout.world_size, self._context.job.run.max_minutes)

    def meet(self, step: int) -> None:
        """The run pauses after this step."""

    def saved(self) -> None:
        """This rank has a copy of what a save writes; training goes on."""

    def ended(self) -> str:
        """What asks to stop after the last step, on all ranks alike; empty: nothing."""
        world_size, limit = self._context.mesh.layout.world_size, self._context.job.run.max_minutes
        preemption = Preemption(world_size, limit, self._remaining)
        preemption.ask(now=True)
        return preemption.due()


class OwnPace(Together):
    """Each worker makes its steps at its own pace: between meetings, no collective joins it with others."""

    def __init__(self, context: BuildContext, meter: Meter, checkpointer: Checkpointer | None) -> None:
        super().__init__(context, meter, checkpointer)
        layout, here = context.mesh.layout, context.mesh.rank
        at = [layout.coordinate(rank)[layout.worker_axis] for rank in range(layout.world_size)]
        mates = [rank for rank, worker in enumerate(at) if worker == at[here]]
        timeout = timedelta(seconds=context.job.comm.init_timeout_s)
        self._mates = dist.new_group(mates, timeout, backend="gloo", use_local_synchronization=True)
        meter.mates = self._mates
        self._ranks_of = [[rank for rank, of in enumerate(at) if of == worker] for worker in context.mesh.spared]
        self._meetings = 0

    def begin(self, step: int) -> Preemption:
        store = shared_store()
        if self._context.mesh.rank == 0 and self._ranks_of:
            failure.begin(store, self._ranks_of)
        return PacedPreemption(self._context.mesh, self._mates, store, step, self._context.job.run.max_minutes)

    def meet(self, step: int) -> None:
        """Before all ranks do something together; goes on without the workers that have died."""
        mesh, job, checkpointer = self._context.mesh, self._context.job, self._checkpointer
        mesh.apart = False
        gone: Collection[int] = {worker for each in self._context.techniques for worker in each.meet(step) or ()}
        if not self._ranks_of:
            return
        self._meetings += 1
        gone = self._agreed(gone)
        if mesh.workers == job.layout.workers - len(gone):
            return
        ranks = mesh.lose(gone)  # from now on the ranks that are there meet without those
        lose_peers()
        self._meter.devices = len(ranks)
        set_timeouts(mesh, job.comm.timeout_s)
        if checkpointer is not None:
            checkpointer.go_on_with(ranks)
        self._remaining = dist.new_group(ranks, timedelta(seconds=job.comm.timeout_s), backend="gloo")
        workers, are = ("worker", "is") if len(gone) == 1 else ("workers", "are")
        log.warning(
            f"step {step}: {workers} {', '.join(map(str, gone))} of {job.layout.workers} {are} gone; "
            f"the run goes on with {mesh.workers}, without their samples"
        )

    def _agreed(self, gone: Collection[int]) -> list[int]:
        """The workers that are gone, as rank 0 says, which hears of them; waits for rank 0."""
        store, key = shared_store(), f"gone at meeting {self._meetings}"
        if self._context.mesh.rank == 0:
            store.set(key, " ".join(map(str, sorted(gone))))
        return [int(worker) for worker in store.get(key).split()]

    def saved(self) -> None:
        """Wait for the others: what a worker sends in its next step may change the state of a rank that copies."""
        dist.all_reduce(torch.zeros(1), group=self._remaining)


class PacedPreemption(Preemption):
    """Asks to stop where workers are at different steps, and are never to wait for each other; before each step.

    The store has the last step that any worker has promised to make. Before each step, the first rank of a worker
    promises the step after it. Once a worker has written there why to stop, no promise is made any more: all workers
    stop after the last promised step, which none of them can have passed. Two messages per worker and step.

    mates: the ranks of this worker, for tensors in host memory.  store: of all ranks.  step: the steps done.
    """

    def __init__(self, mesh: Mesh, mates: dist.ProcessGroup, store: Store, step: int, max_minutes: float) -> None:
        super().__init__(mates.size(), max_minutes, mates)
        self._mesh, self._store, self._step = mesh, store, step
        self._seen = ""  # what the store had last: the last promised step, and the reason to stop after it
        self._reason = 0
        self._shared = torch.zeros(3, dtype=torch.int64)  # this worker's reason; the last step and the reason for it

    def ask(self, *, now: bool = False) -> None:
        """Before a step: promise the next one, and begin to tell the ranks of this worker."""
        self._mesh.apart = True
        self._step += 1
        last, why = self._promise() if dist.get_rank(self._group) == 0 else (0, 0)
        self._shared[0], self._shared[1], self._shared[2] = self._mine(), last, why
        self._share()

    def due(self) -> str:
        assert self._asked is not None
        self._asked.wait()
        self._reason, last, why = self._shared.tolist()
        return self.reason(why) if why and self._step >= last else ""

    def _promise(self) -> tuple[int, int]:
        """The last promised step, and the reason to stop after it, 0 for none."""
        while True:
            last, why = (int(word) for word in self._seen.split()) if self._seen else (0, 0)
            if why:
                return last, why
            wanted = f"{last} {self._reason}" if self._reason else f"{max(last, self._step + 1)} 0"
            if wanted == self._seen:
                return last, 0
            self._seen = self._store.compare_set("promised", self._seen, wanted).decode()
