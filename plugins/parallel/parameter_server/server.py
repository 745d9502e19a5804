"""A server: the order in which pushes are applied and pulls answered, and the rank that does so.

The first rank of a server decides the order, and the other ranks of the same server follow it: so all ranks of a worker
pull weights of one version, and weights that several ranks hold stay the same on all of them. It decides when all of
them have heard the worker: where one dies between the pushes of its ranks, its gradient counts nowhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from queue import Empty, Queue
from threading import Thread
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan.contracts import NamedParameter
from titan.errors import RankFailedError

PUSH, ANSWER, ORDER, HELLO, HEARD = 1, 2, 3, 4, 5
"""Tags: what a message between two ranks is."""

KINDS = ("add", "update", "answer", "lose", "end")
Kind = Literal["add", "update", "answer", "lose", "end"]

DONE = -1
"""In place of a step: a worker says no more, as the run ends or as it has died."""

JOIN_S = 2.0
"""At the end of a run, how long a server's threads have to hear that all workers are done."""


class Arrival(NamedTuple):
    """What a worker says after a step. step: the steps it has done, or `DONE`.  pushed: with a gradient.

    bound: the pull is to have the pushes of all workers up to step - bound.
    """

    worker: int
    step: int
    pushed: int = 0
    bound: int = 0


class Order:
    """What to do when a worker has said something, with a clock for each worker: the last step it has pushed."""

    def __init__(self, workers: int, staleness: int) -> None:
        self.clocks: dict[int, int] = {}
        self.waiting: dict[int, int] = {}  # worker -> the step that all are to have pushed before it is answered
        self._there, self._staleness = set(range(workers)), staleness
        self._held: set[int] = set()
        self._before = 0

    @property
    def begun(self) -> bool:
        """Whether all workers have made their first step, which may compile."""
        return bool(self.clocks) and min(self.clocks.values()) > self._before

    def after(self, arrival: Arrival) -> Iterator[tuple[Kind, int]]:
        """(what, worker): add a worker's gradient, update with what was added, or answer a worker's pull."""
        worker, step, pushed, bound = arrival
        if not self.clocks:  # all begin at the same step
            self.clocks = dict.fromkeys(self._there, step - 1)
            self._before = step - 1
        self.clocks[worker], self.waiting[worker] = step, step - bound
        if pushed:
            self._held.add(worker)
        if self._held and (self._staleness or min(self.clocks.values()) == step):
            yield from (("add", one) for one in sorted(self._held))
            self._held.clear()
            yield "update", worker
        yield from self._answers()

    def lose(self, worker: int) -> Iterator[tuple[Kind, int]]:
        """The same when a worker is done: nobody waits for it any more. Not at staleness 0."""
        self._there.discard(worker)
        for table in (self.clocks, self.waiting):
            table.pop(worker, None)
        yield "lose", worker
        yield from self._answers()

    def _answers(self) -> Iterator[tuple[Kind, int]]:
        slowest = min(self.clocks.values(), default=0)
        for one in sorted(one for one, wanted in self.waiting.items() if wanted <= slowest):
            del self.waiting[one]
            yield "answer", one


class Links(NamedTuple):
    """Ranks of a server, from one of them.

    group: of all ranks, for tensors in host memory.  clients: the ranks that push to this one, by worker.
    mates: all ranks of this server, of which the first decides the order.
    """

    group: dist.ProcessGroup
    worker: int
    clients: Sequence[int]
    mates: Sequence[int]

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Return when it is sent."""
        dist.send(tensor, to, self.group, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Tensor:
        """Return when it is here, however long that takes."""
        dist.recv(tensor, source, self.group, tag)
        return tensor


class Server:
    """This rank's share of the weights, and the threads that serve it.

    parameters: the share, plain and in host memory; updated in place.  flat: all of them, one after the other.
    rate: step -> factor of the peak learning rates.  expendable: workers without which the others go on.
    gone: those of them that have died.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        build: Callable[[Sequence[NamedParameter]], torch.optim.Optimizer],
        flat: Tensor,
        workers: int,
        rate: Callable[[int], float],
        expendable: Collection[int] = (),
    ) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {named.name: named.parameter for named in parameters}
        self.optimizer = build(parameters) if parameters else None
        self.flats: dict[int, Tensor] = {}
        self._answers: Queue[Tensor | Exception] = Queue()
        self.gone: set[int] = set()
        self._flat, self._workers, self._rate, self._expendable = flat, workers, rate, expendable
        self._arrived: dict[int, Queue[Arrival]] = {worker: Queue() for worker in range(workers)}
        self._open: dict[int, Arrival] = {}
        self._said: dict[int, Arrival] = {}  # on the rank that decides: what this rank has heard last,
        self._heard = dict.fromkeys(range(workers), 0)  # and how many ranks of the server have, since the last decision
        self._inbox: Queue[tuple[bool, Arrival]] = Queue()  # heard by this rank, or by another one of the server
        self._added: list[int] = []
        self._updates = 0
        self._pulled = dict.fromkeys(range(workers), 0)  # the number of updates that a worker's weights have
        self._delay = dict.fromkeys(range(workers), 0)
        self._threads: list[Thread] = []

    def serve(self, links: Links, order: Order, limits_s: tuple[float, float]) -> None:
        """Begin. limits_s: the longest that all workers hear nothing, before the first update and after it."""
        self._links, self._order, self._limits_s = links, order, limits_s
        self.allocate()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        remote = [worker for worker in range(self._workers) if worker != links.worker]
        mates = links.mates[1:] if self._leads else ()
        hearing = [*((self._hear, worker) for worker in remote), *((self._hear_mate, rank) for rank in mates)]
        for act, *arguments in ((self._apply,), *hearing):
            thread = Thread(target=self._or_fail, args=(device, act, *arguments), daemon=True)
            thread.start()
            self._threads.append(thread)

    def allocate(self) -> None:
        """Memory for a gradient of each worker, and for what the optimizer is given."""
        self._gradient = torch.zeros_like(self._flat)
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        for parameter, one in zip(self.parameters.values(), self._gradient.split(sizes), strict=True):
            parameter.grad = one.view_as(parameter)
        self.flats = {worker: torch.empty_like(self._flat) for worker in range(self._workers)}

    def close(self) -> None:
        """The worker of this rank is done; return when all are, or when that takes too long: some have failed."""
        self.arrive(Arrival(self._links.worker, DONE))
        ends = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def arrive(self, arrival: Arrival) -> None:
        """What a worker says; its gradient is in `flats`."""
        self._arrived[arrival.worker].put(arrival)
        self._inbox.put((True, arrival))

    def answer(self, limit_s: float) -> list[int]:
        """What the worker of this rank is answered; the weights are in `flats`. Raises what a thread has."""
        try:
            answer = self._answers.get(timeout=limit_s)
        except Empty:
            lead = self._links.mates[0]
            raise RankFailedError(
                f"rank {lead}, which leads a parameter server, was silent for {limit_s:g} s"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer.tolist()

    def _or_fail(self, device: int | None, act: Callable[..., None], *arguments: int) -> None:
        """In a thread, whose device would be GPU 0: a failure is for the main thread to raise."""
        try:
            if device is not None:
                torch.cuda.set_device(device)
            act(*arguments)
        except Exception as error:
            self._answers.put(error)

    def _hear(self, worker: int) -> None:
        """Receive what a worker on another rank says, until it is done."""
        links, step = self._links, 0
        rank = links.clients[worker]
        try:
            while step >= 0:
                step, pushed, bound = links.receive(torch.empty(3, dtype=torch.int64), rank, PUSH).tolist()
                if pushed and self._flat.numel():
                    links.receive(self.flats[worker], rank, PUSH)
                self._pass_on(Arrival(worker, step, pushed, bound))
        except RuntimeError as error:
            if worker not in self._expendable:
                what = f"rank {rank} of worker {worker} has left its parameter server"
                raise RankFailedError(f"{what}: {error}") from error
            self._pass_on(Arrival(worker, DONE))

    def _pass_on(self, arrival: Arrival) -> None:
        """Of a worker on other ranks, to the thread that applies, and to the rank that decides."""
        self.arrive(arrival)
        if not self._leads:
            self._links.send(torch.tensor([arrival.worker, arrival.step]), self._links.mates[0], HEARD)

    def _hear_mate(self, rank: int) -> None:
        """On the first rank: receive what another rank of this server has heard, until all workers are done."""
        left = self._workers - 1
        while left:
            worker, step = self._links.receive(torch.empty(2, dtype=torch.int64), rank, HEARD).tolist()
            left -= step == DONE
            self._inbox.put((False, Arrival(worker, step)))

    @property
    def _leads(self) -> bool:
        return self._links.mates[0] == self._links.clients[self._links.worker]

    def _apply(self) -> None:
        with torch.no_grad():
            for what, worker in self._decided() if self._leads else self._told():
                self.do(what, worker)

    def do(self, what: Kind, worker: int) -> None:
        """The next of what `Order` decides; waits for what the worker says, on a rank that has not heard it yet."""
        if what == "update":
            self._update()
            return
        if what == "lose":
            self.gone.add(worker)
            self._open.pop(worker, None)
            return
        if worker not in self._open:
            self._open[worker] = self._arrived[worker].get()
        if what == "add":
            self._added.append(worker)
        else:
            self._answer(worker)

    def _decided(self) -> Iterator[tuple[Kind, int]]:
        """On the first rank of a server: what is to be done, which the other ranks are told first."""
        left = set(range(self._workers))
        while left:
            try:
                limit_s = self._limits_s[self._order.begun] if self._order.waiting else None
                here, arrival = self._inbox.get(timeout=limit_s)
            except Empty:
                self._tell_late()
                return
            for what, worker in self._following(here, arrival, left):
                self._tell(what, worker)
                yield what, worker
        self._tell("end", 0)

    def _following(self, here: bool, arrival: Arrival, left: set[int]) -> Iterable[tuple[Kind, int]]:
        """What to do when a rank of this server has heard a worker.

        here: this rank has.  left: workers that are not done; one that is gets removed.
        """
        worker = arrival.worker
        if worker not in left:
            return ()
        if arrival.step == DONE:
            left.remove(worker)
            return self._order.lose(worker) if worker in self._expendable else ()
        if here:
            self._said[worker] = arrival
        self._heard[worker] += 1
        if self._heard[worker] < (1 if worker == self._links.worker else len(self._links.mates)):
            return ()
        self._heard[worker] = 0
        return self._order.after(self._said[worker])

    def _tell(self, what: Kind, worker: int) -> None:
        for rank in self._links.mates[1:]:
            self._links.send(torch.tensor([KINDS.index(what), worker]), rank, ORDER)

    def _told(self) -> Iterator[tuple[Kind, int]]:
        """On the other ranks of a server."""
        while True:
            kind, worker = self._links.receive(torch.empty(2, dtype=torch.int64), self._links.mates[0], ORDER).tolist()
            if KINDS[kind] == "end":
                return
            yield KINDS[kind], worker

    def _update(self) -> None:
        """A step with the mean of the gradients added, at the rate of lr * their number / max(workers, delay).

        Of the workers that are there.
        """
        first, *others = self._added
        self._gradient.copy_(self.flats[first])
        for worker in others:
            self._gradient.add_(self.flats[worker])
        self._gradient.div_(len(self._added))
        for worker in self._added:
            self._delay[worker] = self._updates - self._pulled[worker]
        delay = max(self._delay[worker] for worker in self._added)
        factor = self._rate(self._open[first].step) * len(self._added) / max(self._workers - len(self.gone), delay)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor
            self.optimizer.step()
        self._updates += 1
        self._added.clear()

    def _answer(self, worker: int) -> None:
        self._open.pop(worker)
        self._pulled[worker] = self._updates
        self.flats[worker].copy_(self._flat)
        # It may have died since it has asked.
        with contextlib.suppress(RuntimeError) if worker in self._expendable else contextlib.nullcontext():
            self._send(worker, torch.tensor([-1, 0, self._delay[worker]]), self.flats[worker])

    def _tell_late(self) -> None:
        """Tell those who wait for whom they do."""
        slowest = min(self._order.clocks, key=lambda worker: self._order.clocks[worker])
        for worker in self._order.waiting:
            with contextlib.suppress(RuntimeError):  # one that is gone keeps no other from hearing it
                self._send(worker, torch.tensor([slowest, self._order.clocks[slowest], 0]))

    def _send(self, worker: int, head: Tensor, weights: Tensor | None = None) -> None:
        if worker == self._links.worker:
            self._answers.put(head)
            return
        self._links.send(head, self._links.clients[worker], ANSWER)
        if weights is not None and weights.numel():
            self._links.send(weights, self._links.clients[worker], ANSWER)


def received(group: dist.ProcessGroup, tensor: Tensor, source: int, limit_s: float) -> Tensor:
    """An answer of a server on another rank.

    Raises:
        RankFailedError: there is none in time, or the server is gone.
    """
    try:
        work = dist.irecv(tensor, source, group, ANSWER)
        assert work is not None
        work.wait(timedelta(seconds=limit_s))
    except RuntimeError as error:
        what = f"did not answer within {limit_s:g} s" if "Timed out" in str(error) else "is gone"
        raise RankFailedError(f"the parameter server on rank {source} {what}: {error}") from error
    return tensor
