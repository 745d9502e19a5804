"""Parameter servers: data parallelism at staleness 0, exact; and what staleness allows, and what it does not."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.commands import launch
from tests.contract.test_guests import GUESTS
from tests.dist.test_local_steps import assert_one_update_skipped, assert_same_losses_and_weights
from tests.dist.test_nonfinite import SKIP, inject_nan
from tests.jobs import FOUR_LAYERS, LLAMA, SAVING, mesh, of_each_worker
from tests.signals import job
from tests.sweeps import swept_case
from titan.config import load_job
from titan.contracts import NamedParameter
from titan.errors import ConfigError
from titan.plugins.parallel.parameter_server.server import Arrival, Links, Order, Server
from titan.testing.jobs import read_rows, saved_tensors, train_job
from titan.testing.ranks import RankError

FREE = ("--train.grad_clip", "0")
SGD = ("--optimizer.name", "sgd", "--optimizer.lr", "0.1", "--optimizer.momentum", "0.9")
STATE = "rest.techniques.parameter_server.optimizer."
PLUGINS = Path(__file__).parents[1] / "plugins"
STRAGGLER = ("--plugins.path", str(PLUGINS / "straggler.py"))


def serving(servers: int = 1, staleness: int = 0) -> list[str]:
    """Words of a command line that set options of the technique."""
    given = {"servers": servers, "staleness": staleness}
    return [word for name, value in given.items() for word in (f"--plugins.parameter_server.{name}", str(value))]


@pytest.mark.parametrize(
    ("words", "servers", "same"),
    [
        swept_case((mesh(worker=4), 3, (*SGD, *FOUR_LAYERS))),
        (mesh(worker=2, tp=2), 1, ()),
        (mesh(worker=2, pp=2), 2, ("--model.tied", "true")),
    ],
    ids=str,
)
def test_staleness_0_is_data_parallelism(
    words: list[str], servers: int, same: tuple[str, ...], one_rank, tmp_path: Path
) -> None:
    """Loss, of the workers' mean, and weights, as of one process; ranks that hold the same weight agree to the bit."""
    many = train_job(tmp_path, 4, *same, *FREE, *words, *serving(servers))
    assert_same_losses_and_weights(one_rank(*same, *FREE), many)


def test_state_comes_back_at_any_number_of_workers_and_servers(one_rank, tmp_path: Path) -> None:
    """AdamW, from 2 workers of 2 ranks with 2 servers to as many workers as there are ranks, 4, with 1 server."""
    same = [*SAVING, *FREE, "--checkpoint.keep_latest", "0", "--train.steps", "6"]
    train_job(tmp_path, 4, *same, *mesh(worker=2, dp_shard=2), *serving(2))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    many = train_job(tmp_path, 4, *same, *mesh(worker=-1, dp_shard=1), *serving())
    assert_same_losses_and_weights(one_rank(*FREE, "--train.steps", "6"), many)
    assert STATE + "exp_avg.norm.weight" in saved_tensors(tmp_path / "run" / "checkpoints" / "step-00000006")


@pytest.mark.parametrize(("tp", "servers"), [swept_case((1, 1)), (2, 2)])
def test_a_slow_worker_slows_nobody_within_the_bound(tp: int, servers: int, tmp_path: Path) -> None:
    """At staleness 2 the first worker begins its third step, and no fourth, while the second is before its first.

    A save has every push, and all ranks the same weights, to the bit, also those that ranks of a worker hold alike.
    """
    words = [*mesh(worker=2, tp=tp), *serving(servers, 2), *STRAGGLER, "--plugins.straggler.until", "3"]
    run = train_job(tmp_path, 2 * tp, *SAVING, *words, "--train.steps", "5")
    saved = saved_tensors(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert float(saved[STATE + "step.norm.weight"]) == 2 * 4
    assert sorted(run.rows) == [1, 2, 3, 4, 5]
    assert run.rows[1]["push_delay"] == 0 and all("push_delay_max" in row for row in run.rows.values())


def test_who_is_waited_for_too_long_is_named(tmp_path: Path) -> None:
    slow = [*STRAGGLER, "--plugins.straggler.at", "2", "--comm.timeout_s", "2"]
    with pytest.raises(RankError, match="worker 0 waits for worker 1, which has done 1 steps"):
        train_job(tmp_path, 2, *mesh(worker=2), *serving(), *slow)


def test_a_nan_of_one_worker_pushes_nothing(tmp_path: Path) -> None:
    """The others' gradients count as ever."""
    words = [*SAVING, *mesh(worker=2), *serving(), *inject_nan(2, rank=1), "--train.steps", "4"]
    run = train_job(tmp_path, 2, *words, *SKIP)
    assert_one_update_skipped(run)
    assert float(saved_tensors(tmp_path / "run" / "checkpoints" / "step-00000004")[STATE + "step.norm.weight"]) == 4


def _said(order: Order, arrivals: Iterable[tuple[int, int]], bound: int) -> list[list[str]]:
    return [
        [f"{what} {worker}" for what, worker in order.after(Arrival(worker, step, 1, bound))]
        for worker, step in arrivals
    ]


def test_the_order_of_a_synchronous_step_is_that_of_the_workers() -> None:
    order = Order(3, 0)
    all_of_it = ["add 0", "add 1", "add 2", "update 1", "answer 0", "answer 1", "answer 2"]
    assert _said(order, [(2, 5), (0, 5), (1, 5)], 0) == [[], [], all_of_it]


def test_a_pull_waits_at_the_bound_and_not_before() -> None:
    """At staleness 1, as recorded by the clocks of two workers; the pull of a meeting waits for all."""
    order = Order(2, 1)
    first = _said(order, [(0, 8), (0, 9)], 1)
    assert first == [["add 0", "update 0", "answer 0"], ["add 0", "update 0"]]
    assert _said(order, [(1, 8)], 1) == [["add 1", "update 1", "answer 0", "answer 1"]]
    assert list(order.after(Arrival(0, 9, 0, 0))) == []
    assert _said(order, [(1, 9)], 1) == [["add 1", "update 1", "answer 0", "answer 1"]]
    assert order.clocks == {0: 9, 1: 9}


class _Alone(Server):
    """Sends nothing, and updates one weight by SGD."""

    def __init__(self, flat: Tensor, lr: float, workers: int, rate: Callable[[int], float], *more: Any) -> None:
        named = [NamedParameter("w", nn.Parameter(flat), "vector", False)]
        super().__init__(named, lambda _: torch.optim.SGD([named[0].parameter], lr), flat, workers, rate, *more)
        self.allocate()

    def _send(self, worker: int, head: Tensor, weights: Tensor | None = None) -> None: ...


def test_a_late_push_counts_the_less() -> None:
    """Of 2 workers, against plain arithmetic: a rate of lr / max(2, d), with d the pushes since the worker's pull."""
    flat = torch.zeros(3)
    server = _Alone(flat, 0.5, 2, lambda _: 1)
    weights, pulled, updates = torch.zeros(3), [0, 0], 0
    with torch.no_grad():
        for step, worker in enumerate((0, 0, 0, 1, 0), 1):
            gradient = torch.tensor([1.0, -2.0, 0.25]) * (step + worker)
            server.flats[worker].copy_(gradient)
            server.arrive(Arrival(worker, step, 1))
            for what in ("add", "update", "answer"):
                server.do(what, worker)  # type: ignore[arg-type]
            weights = weights - 0.5 / max(2, updates - pulled[worker]) * gradient
            updates += 1
            pulled[worker] = updates
            torch.testing.assert_close(flat, weights)
            torch.testing.assert_close(server.flats[worker], weights)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*mesh(worker=2), *FOUR_LAYERS, *serving(3)], "servers = 3: at most one per worker and per layer, so 2"),
        (serving(), "mesh.worker = 1: needs at least 2 workers"),
        ([*mesh(worker=2), *serving(1, -1)], "staleness"),
        ([*mesh(worker=2), *serving(), "--plugins.local_steps.every", "2"], "both join the weights of mesh.worker"),
        ([*mesh(worker=2), *serving(), "--plugins.offload.optimizer", "true"], "offload] changes the optimizer of"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_job(LLAMA, ["--data.path", "text", *words], 2 if "--mesh.worker" in words else 1)


def test_optimizers_that_servers_cannot_have_are_refused(tmp_path: Path) -> None:
    """One around the workers' optimizer; one that updates a matrix as a whole, of which ranks have slices."""
    lookahead = [*GUESTS, *mesh(worker=2), *serving(), "--plugins.lookahead.every", "2"]
    with pytest.raises(RankError, match=r"\[plugins.lookahead\] changes the optimizer of workers"):
        train_job(tmp_path, 2, *lookahead)
    muon = [*GUESTS, *mesh(worker=2, dp_shard=2), *serving(), "--optimizer.name", "whole_muon"]
    with pytest.raises(RankError, match=r"updates the numbers of .* together"):
        train_job(tmp_path, 4, *muon)


def test_techniques_that_leave_the_optimizer_alone_go_with_servers(tmp_path: Path) -> None:
    """Both have the hook `optimizer`, and change nothing by it here."""
    same = [*mesh(worker=2), *serving(), "--train.steps", "3"]
    bf16 = ["--plugins.bf16.enabled", "true", "--plugins.offload.optimizer", "false"]
    found = train_job(tmp_path, 2, *same, *bf16, "--plugins.offload.activations", "true")
    plain = train_job(tmp_path, 2, *same, name="plain")
    assert found.loss == pytest.approx(plain.loss, rel=5e-3)


@pytest.mark.sweep
def test_a_server_that_dies_costs_the_steps_since_the_last_save(tmp_path: Path) -> None:
    """The launcher ends the other ranks, whose threads wait for it, and begins again from the newest checkpoint."""
    once = str(tmp_path / "once")
    words = [*mesh(worker=2), *serving(1, 1), "--checkpoint.every", "2", "--checkpoint.async", "false"]
    argv = job(tmp_path, *words, rank=0, step=4, signal="SIGKILL", once=once)
    code, said = launch(argv, NPROC=2, MAX_RESTARTS=1)
    assert code == 0 and "rank 0 was killed by SIGKILL" in said, said
    assert "step-00000002, step 2" in said and sorted(read_rows(tmp_path / "run")) == list(range(1, 11))


@pytest.mark.parametrize(
    ("words", "servers", "ranks", "when", "of_one"),
    [(mesh(worker=4), 2, 4, "before", "rank 3"), swept_case((mesh(worker=3, tp=2), 1, 6, "after", "ranks 4, 5"))],
    ids=["workers of a rank", "workers of two ranks"],
)
def test_a_worker_that_dies_is_gone_and_not_the_run(
    words: list[str], servers: int, ranks: int, when: str, of_one: str, tmp_path: Path
) -> None:
    """Its last rank is killed before step 4 of 10, while a save is in flight; or after it, while the other rank pushes.

    The others validate and save, and end. All samples are validated, on the weights that are saved, and the run comes
    back at another layout.
    """
    text = ("--validation.name", "text", "--validation.path", str(tmp_path / "text"), "--validation.samples", "0")
    same = ("--checkpoint.every", "2", "--validation.every", "10", "--train.global_batch_size", "12", *text)
    argv = job(tmp_path, *words, *serving(servers, 1), *same, rank=ranks - 1, step=4, signal="SIGKILL", when=when)
    code, said = launch(argv, NPROC=ranks)
    workers = int(words[words.index("--mesh.worker") + 1])
    assert code == 0 and f"the run goes on without its worker, {of_one}" in said, said
    gone = f"worker {workers - 1} of {workers} is gone; the run goes on with {workers - 1}, without their samples"
    assert gone in said
    rows = read_rows(tmp_path / "run")
    assert sorted(rows) == list(range(1, 11))
    for key in ("tokens", "valid_tokens"):
        assert rows[10][key] - rows[9][key] == 12 * 16 * (workers - 1) / workers
    path = tmp_path / "run" / "checkpoints" / "step-00000010"
    first, *others = of_each_worker(path, "model.norm.weight")
    assert len(others) == workers - 2 and all(torch.equal(first, other) for other in others)
    unchanged = ("--optimizer.lr", "1e-30", "--train.steps", "1", "--validation.every", "1")
    one = train_job(tmp_path, 1, "--checkpoint.init_from", str(path), *unchanged, *text, name="one")
    assert rows[10]["validation_loss"] == pytest.approx(one.rows[1]["validation_loss"], rel=1e-6)
    again = [*argv, "--train.steps", "12", "--mesh.worker", "2", "--mesh.tp", "1", *serving(1, 1)]
    code, said = launch([*again, "--plugins.send_signal.step", "99"], NPROC=2)
    assert code == 0 and "step-00000010, step 10" in said and max(read_rows(tmp_path / "run")) == 12, said


def test_a_worker_that_ends_the_run_on_purpose_ends_it(tmp_path: Path) -> None:
    """By a loss that is not finite, which `non_finite = "stop"` does not allow on any worker."""
    argv = job(tmp_path, *mesh(worker=3), *serving(1, 1), "--train.global_batch_size", "6", *inject_nan(4, rank=2))
    code, said = launch(argv, NPROC=3)
    assert code == 1 and "step 4 gave loss" in said and "goes on without its worker" not in said, said


def test_no_worker_goes_on_while_a_rank_copies_what_is_saved(tmp_path: Path) -> None:
    """Its pushes would change what another rank is copying."""
    slow = ["--plugins.path", str(PLUGINS / "slow_copy.py"), "--plugins.slow_copy.at", "2"]
    words = [*mesh(worker=2), *serving(1, 2), *slow, *SAVING, "--checkpoint.every", "2", "--train.steps", "4"]
    assert sorted(train_job(tmp_path, 2, *words).rows) == [1, 2, 3, 4]


def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    """At staleness 1, also one that dies before anybody has pushed; the last answer that others wait for is given."""
    order = Order(3, 1)
    assert list(order.lose(2)) == [("lose", 2)]
    assert _said(order, [(0, 8), (0, 9)], 1) == [["add 0", "update 0", "answer 0"], ["add 0", "update 0"]]
    assert list(order.lose(1)) == [("lose", 1), ("answer", 0)]
    assert order.clocks == {0: 9} and not order.waiting


class _First(_Alone):
    """The first of the two ranks of a server that is worker 0 of 4, of which workers 2 and 3 may die."""

    def __init__(self, flat: Tensor, rates: list[int]) -> None:
        super().__init__(flat, 3.0, 4, lambda step: rates.append(step) or 1.0, (2, 3))
        self._links, self._order = Links(dist.GroupMember.NON_GROUP_MEMBER, 0, [0, 2, 4, 6], [0, 1]), Order(4, 5)
        self._limits_s = 60.0, 60.0

    def _tell(self, what: str, worker: int) -> None: ...

    def hears(self, *heard: tuple[bool, Arrival]) -> list[str]:
        """What it decides and does then; the others are done."""
        for here, arrival in heard:
            if here:
                self._arrived[arrival.worker].put(arrival)
            self._inbox.put((here, arrival))
        for worker in range(4):
            self._inbox.put((False, Arrival(worker, -1)))
        done = []
        with torch.no_grad():
            for what, worker in self._decided():
                said = worker in self._open or not self._arrived[worker].empty()
                assert said or what in ("update", "lose"), f"{what} {worker}: would wait for ever"
                self.do(what, worker)
                done.append(f"{what} {worker}")
        return done


def test_a_push_counts_when_all_ranks_of_the_server_have_it() -> None:
    """Of worker 3, which dies, one rank has pushed; worker 2 dies later. Its whole push counts, of four workers."""
    flat, rates = torch.ones(2), []
    server = _First(flat, rates)
    for worker in (2, 3):
        server.flats[worker].fill_(0.5)
    half, whole = Arrival(3, 7, 1, 5), Arrival(2, 7, 1, 5)
    done = server.hears((True, half), (True, whole), (False, Arrival(3, -1)), (False, Arrival(2, 7)))
    assert done == ["lose 3", "add 2", "update 2", "answer 2", "lose 2"]
    torch.testing.assert_close(flat, torch.ones(2) - 3 / 3 * 0.5)
    assert server.gone == {2, 3} and rates == [7]
