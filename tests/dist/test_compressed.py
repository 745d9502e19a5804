"""Compressed gradients: each method against plain arithmetic, nothing lost, one process's curve where all is sent."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.jobs import GPT, LLAMA, MOE, SAVING, mesh, of_each_worker, settings, stored
from tests.sweeps import but_sweep, swept_case
from titan.contracts import Technique
from titan.plugins.parallel.compressed import methods
from titan.testing.jobs import saved_tensors, train_job
from titan.testing.ranks import run_ranks

PLUGIN = "--plugins.compressed_gradients."
HSDP = mesh(dp_replicate=2, dp_shard=2)


def on(method: str, **options: Any) -> list[str]:
    """Words that switch a method on, without a warm-up."""
    given = {"method": method, "warmup_steps": 0, **options}
    return [word for key, value in given.items() for word in (PLUGIN + key, str(value))]


# --- each method ----------------------------------------------------------------------------------------------------

SHAPES = {"a": (12, 10), "b": (2, 9, 7), "c": (3, 5)}
METHODS = {
    "powersgd": methods.PowerSGD(2),
    "powersgd, all columns": methods.PowerSGD(99),
    "topk": methods.TopK(0.1),
    "topk, all": methods.TopK(1.0),
    "randk": methods.RandK(0.1),
    "randk, all": methods.RandK(1.0),
    "sign": methods.Sign(),
    "int8": methods.Int8(8),
}
RANKS, STEPS = 3, 4


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """Of a rank in a step, of very different sizes, some of them zero."""
    drawn = torch.Generator().manual_seed(97 * rank + step)
    found = {name: torch.randn(shape, generator=drawn) * 10.0 ** (rank - 3) for name, shape in SHAPES.items()}
    found["b"][rank % 2] = 0
    return found


def _exchanged(method: methods.Method) -> list[tuple[dict[str, Tensor], ...]]:
    """On one rank: (whole, sums, sent) of each step, where a whole is a gradient and what was left before."""
    replicas = methods.Replicas(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    errors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    if isinstance(method, methods.PowerSGD):
        for name, error in errors.items():
            method.begin(name, error)
    found = []
    for step in range(1, STEPS + 1):
        whole = {name: gradient + errors[name] for name, gradient in gradients(replicas.rank, step).items()}
        sums, sent = method(whole, step, replicas)
        errors = {name: whole[name] - sent[name] for name in whole}
        found.append((whole, dict(sums), dict(sent)))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_and_what_is_left_add_up_to_the_gradients(method: str) -> None:
    ranks = run_ranks(_exchanged, RANKS, METHODS[method])
    for name, shape in SHAPES.items():
        arrived, given = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        for step in range(STEPS):
            each = [rank[step] for rank in ranks]
            for _, sums, sent in each:
                assert sums[name].equal(each[0][1][name]), "ranks have other sums"
                assert sent[name].shape == sums[name].shape == shape
            arrived += each[0][1][name]
            given += sum(gradients(rank, step + 1)[name].double() for rank in range(RANKS))
            left = sum((whole[name] - sent[name]).double() for whole, _, sent in each)
            torch.testing.assert_close(arrived + left, given, rtol=1e-5, atol=1e-6)
            if "all" in method:
                torch.testing.assert_close(arrived, given, rtol=1e-5, atol=1e-6)
            else:
                assert left.abs().max() > 1e-4, "nothing was compressed"


def _tenth(whole: Tensor) -> Tensor:
    """The numbers of largest size."""
    least = sorted(whole.abs().flatten().tolist())[-math.ceil(0.1 * whole.numel())]
    return torch.where(whole.abs() >= least, whole, 0.0)


def _signs(whole: Tensor) -> Tensor:
    return torch.where(whole >= 0, 1.0, -1.0) * whole.abs().mean()


@pytest.mark.parametrize(("method", "definition"), [("topk", _tenth), ("sign", _signs)])
def test_numbers_and_signs_by_definition(method: str, definition: Callable[[Tensor], Tensor]) -> None:
    ranks = run_ranks(_exchanged, RANKS, METHODS[method])
    for step in range(STEPS):
        for name in SHAPES:
            expected = [definition(rank[step][0][name]) for rank in ranks]
            for rank, sent in zip(ranks, expected, strict=True):
                torch.testing.assert_close(rank[step][2][name], sent)
            torch.testing.assert_close(ranks[0][step][1][name], sum(expected))


def test_random_places_are_each_ranks_come_once_and_change() -> None:
    ranks = run_ranks(_exchanged, RANKS, methods.RandK(0.25))
    for name, shape in SHAPES.items():
        drawn = set()
        for step in range(STEPS):
            wholes, places = [rank[step][0][name] for rank in ranks], ranks[2][step][2][name] != 0
            drawn.add(tuple(places.flatten().tolist()))
            if name != "b":  # which has zeros
                assert places.sum() == math.ceil(0.25 * math.prod(shape))
            torch.testing.assert_close(ranks[0][step][1][name][places], sum(wholes)[places])
        assert len(drawn) == STEPS
    randk, of = methods.RandK(0.1), torch.zeros(90)
    everywhere = sum(randk._places("w", step, of).bincount(minlength=90) for step in range(999))
    assert everywhere.sum() == 999 * 9 and everywhere.min() > 60 and everywhere.max() < 140


def test_integers_by_definition() -> None:
    """Rounded by each rank, added up, and rounded again by one rank per chunk, whose error has what that lost."""
    ranks = run_ranks(_exchanged, RANKS, METHODS["int8"])

    def rounded(flat: Tensor) -> Tensor:
        found = [(b / (s := b.abs().max() / 127)).round() * s if b.any() else b for b in flat.split(8)]
        return torch.cat(found)

    for step in range(STEPS):
        for name, shape in SHAPES.items():
            wholes = [rank[step][0][name].flatten() for rank in ranks]
            each = [rounded(whole) for whole in wholes]
            torch.testing.assert_close(ranks[0][step][1][name].flatten(), rounded(sum(each)), rtol=1e-5, atol=1e-9)
            second = sum(rank[step][2][name] for rank in ranks).flatten() - sum(each)
            torch.testing.assert_close(second, rounded(sum(each)) - sum(each), rtol=1e-3, atol=1e-7)
            assert math.prod(shape) == len(second)


def test_low_rank_by_definition() -> None:
    """P = (sum of M) Q made orthonormal, the sum is P P' (sum of M), and the next Q is (sum of M)' P."""
    ranks = run_ranks(_exchanged, RANKS, METHODS["powersgd"])
    begun = methods.PowerSGD(2)
    for name, shape in SHAPES.items():
        begun.begin(name, torch.zeros(shape))
        factors = begun.factors[name].double()
        assert factors.abs().max() <= 0.5 and 0.2 < factors.std() < 0.4
        for step in range(STEPS):
            wholes = [rank[step][0][name].double().view(-1, *shape[-2:]) for rank in ranks]
            total = sum(wholes)
            basis, _ = torch.linalg.qr(total @ factors)
            for rank, whole in zip(ranks, wholes, strict=True):
                sent = rank[step][2][name].double().view_as(whole)
                torch.testing.assert_close(sent, basis @ basis.mT @ whole, rtol=1e-3, atol=1e-5)
            factors = total.mT @ basis


# --- runs -----------------------------------------------------------------------------------------------------------

ALL = {
    "powersgd": {"rank": 257},
    "topk": {"density": 1.0},
    "randk": {"density": 1.0},
    "sign": {"warmup_steps": 10},
    "int8": {"warmup_steps": 10},
}
TIED = ("--model.tied", "true")
SIX = ("--train.global_batch_size", "6")
ACCUMULATED = [*HSDP, "--train.micro_batch_size", "1", "--plugins.fsdp.zero_stage"]
LAYOUTS: dict[str, tuple[int, str, list[str], Path]] = {
    "replicas alone": (2, "topk", mesh(dp_replicate=2), LLAMA),
    "3 replicas, sizes that do not divide": (3, "randk", [*mesh(dp_replicate=3), *SIX], LLAMA),
    "hsdp 2x2, accumulation, zero 3": (4, "topk", [*ACCUMULATED, "3"], LLAMA),
    "hsdp 2x2, accumulation, zero 1": (4, "powersgd", [*ACCUMULATED, "1"], LLAMA),
    "tp 2, learned positions": (4, "topk", mesh(dp_replicate=2, tp=2), GPT),
    "pp 2, a tied head": (4, "randk", [*mesh(dp_replicate=2, pp=2), *TIED], LLAMA),
    "cp 2": (4, "sign", mesh(dp_replicate=2, cp=2), LLAMA),
    "ep 2 of dp_shard 2": (4, "topk", mesh(dp_replicate=2, dp_shard=2, ep=2), MOE),
    "dp_shard 2, tp 2, integers": (8, "int8", mesh(dp_replicate=2, dp_shard=2, tp=2), LLAMA),
}
SWEPT = ("replicas alone", "hsdp 2x2, accumulation, zero 1", "dp_shard 2, tp 2, integers")
SWEPT += ("tp 2, learned positions", "ep 2 of dp_shard 2", "cp 2")


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, *SWEPT))
def test_where_all_is_sent_the_curve_is_one_processs(layout: str, same_curve) -> None:
    ranks, method, words, config = LAYOUTS[layout]
    same = settings(words, "--train.global_batch_size", "--model.tied")
    same_curve(ranks, [*words, *on(method, **ALL[method])], same, config)


@pytest.mark.sweep
def test_bf16_means_what_it_means_on_one_rank(one_rank, tmp_path: Path) -> None:
    """Within the bounds of docs/correctness.md for bf16."""
    bf16 = ("--plugins.bf16.enabled", "true")
    many = train_job(tmp_path, 4, *bf16, *HSDP, *on("topk", density=1.0)).rows
    one = one_rank(*bf16).rows
    for step, row in one.items():
        assert math.isclose(row["loss"], many[step]["loss"], rel_tol=2e-3), step
        assert math.isclose(row["grad_norm"], many[step]["grad_norm"], rel_tol=2e-2), step


LOSSY = {
    "powersgd": (HSDP, {"rank": 2}),
    "topk": (mesh(dp_replicate=2, tp=2), {"density": 0.05}),
    "randk": ([*mesh(dp_replicate=2, pp=2), *TIED], {"density": 0.05}),
    "sign": (HSDP, {}),
    "int8": (mesh(dp_replicate=3), {"block": 64}),
}
FAST = ("--optimizer.name", "sgd", "--optimizer.lr", "0.1", "--optimizer.momentum", "0")


@pytest.mark.parametrize("method", but_sweep(LOSSY, "randk", "sign", "topk"))
def test_replicas_stay_equal_and_what_is_left_is_measured(method: str, one_rank, tmp_path: Path) -> None:
    """`train_job` compares them bit by bit."""
    words, options = LOSSY[method]
    ranks = math.prod(int(degree) for degree in words[1:4:2] if degree.isdigit())
    batch = ("--train.global_batch_size", "12")
    many = train_job(tmp_path, ranks, *words, *batch, *FAST, *on(method, **options, warmup_steps=2))
    one = one_rank(*batch, *FAST, *(TIED if "--model.tied" in words else ()))
    apart = {step: abs(row["loss"] / one.rows[step]["loss"] - 1) for step, row in many.rows.items()}
    assert max(apart[1], apart[2], apart[3]) < 1e-5  # both steps of the warm-up, and what these have led to
    assert 1e-6 < max(apart.values()) < 0.2 and many.rows[6]["loss"] < many.rows[1]["loss"]
    for step, row in many.rows.items():
        assert ("compression_error" in row) == (step > 2) and row.get("compression_error", 1) > 1e-3


LR_1 = ("--optimizer.name", "sgd", "--optimizer.lr", "1", "--optimizer.momentum", "0", "--train.grad_clip", "0")
LR_1 += ("--lr_schedule.name", "constant", "--lr_schedule.warmup_steps", "0", "--optimizer.weight_decay", "0")


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    tensors = saved_tensors(folder / "checkpoints" / f"step-{step:08}")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


def own_state(folder: Path, step: int, of: str = "") -> dict[str, Tensor]:
    """Of a checkpoint's tensors of the technique, or of a kind of them: [replicas, ...], as each has one of its own."""
    begin, path = f"rest.techniques.compressed_gradients.{of}", folder / "checkpoints" / f"step-{step:08}"
    names = [name for name in stored(path).tensors if name.startswith(begin)]
    return {name.removeprefix(begin): torch.stack(of_each_worker(path, name)) for name in names}


def errors(folder: Path, step: int) -> dict[str, Tensor]:
    """Of each matrix, what each replica has left."""
    return own_state(folder, step, "errors.")


@pytest.mark.parametrize(
    ("ranks", "words", "method", "config"),
    [
        (4, HSDP, "int8", LLAMA),
        (4, mesh(dp_replicate=2, tp=2), "sign", GPT),
        swept_case((4, mesh(dp_replicate=2, dp_shard=2, ep=2), "powersgd", MOE)),
        (4, [*mesh(dp_replicate=2, pp=2), *TIED], "topk", LLAMA),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_update_and_what_is_left_are_the_gradient(
    ranks: int, words: list[str], method: str, config: Path, tmp_path: Path
) -> None:
    """With rate 1 the first update is the gradient: what replicas sent, and in their errors all that they did not."""
    same = (*LR_1, *SAVING, "--train.steps", "1", *(TIED if "--model.tied" in words else ()))
    train_job(tmp_path, 1, *same, config=config, name="one")
    options = {"rank": 2} if method == "powersgd" else {"density": 0.1} if method == "topk" else {}
    train_job(tmp_path, ranks, *same, *words, *on(method, **options), config=config, name="many")
    whole, sent, left = weights(tmp_path / "one", 1), weights(tmp_path / "many", 1), errors(tmp_path / "many", 1)
    assert left and all(name in whole and whole[name].ndim > 1 for name in left)
    for name, weight in whole.items():
        lost = left[name].sum(0) if name in left else torch.zeros_like(weight)
        torch.testing.assert_close(sent[name] - lost, weight, rtol=1e-5, atol=2e-7, msg=name)
    assert all(len(each) == 2 and each.any() for each in left.values())
    plain = {name for name, weight in whole.items() if weight.ndim > 1} - left.keys()
    routers = {name for name in plain if "router" in name}  # whose factors would be as large
    expected = {TIED[0]: {"embed.weight"}, "--mesh.tp": {"positions.weight"}, "--mesh.ep": routers}
    assert plain == expected.get(words[-2], set())


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["powersgd", swept_case("randk")])
def test_resumed_at_the_same_layout_bit_for_bit(method: str, tmp_path: Path) -> None:
    words = [*HSDP, *on(method, density=0.05), *SAVING, "--checkpoint.every", "2", "--train.steps", "4"]
    whole = train_job(tmp_path, 4, *words, name="whole")
    train_job(tmp_path, 4, *words, "--train.steps", "2", name="halves")
    halves = train_job(tmp_path, 4, *words, name="halves")
    assert [name for name in whole.weights if not whole.weights[name].equal(halves.weights[name])] == []
    ours, theirs = (own_state(tmp_path / name, 4) for name in ("whole", "halves"))
    assert ours and [name for name in ours if not ours[name].equal(theirs[name])] == []


def _built(folder: str, words: list[str], config: str) -> tuple[Any, Technique]:
    """On one rank: the job's run, before its first step, and the technique in it."""
    from titan.config import load_job
    from titan.ranks import process
    from titan.ranks.meeting.launch_env import launched_world_size
    from titan.training import build

    overrides = ["--run.dir", folder, "--data.cache", f"{folder}/cache", *words]
    job = load_job(Path(config), overrides, launched_world_size())
    run = build.build(job, process.join(job))
    [technique] = [one for one in run.context.techniques if one.name == "compressed_gradients"]
    return run, technique


def _held(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: what it has of each error once a run is built, whole, by name and place among the replicas."""
    from titan.training import trainer

    run, technique = _built(folder, words, config)
    place = run.context.mesh.at("dp_replicate")
    state = technique.state_dict()["errors"]
    found = {f"{name} {place}": e.full_tensor() if isinstance(e, DTensor) else e for name, e in state.items()}
    trainer.close(run)
    return found


@pytest.mark.parametrize(
    "degrees", [*map(swept_case, [{"dp_replicate": 4}, {"dp_replicate": 2, "tp": 2}]), {"dp_shard": 2}], ids=str
)
def test_the_sum_of_errors_is_kept_at_another_layout(degrees: dict[str, int], tmp_path: Path, capfd) -> None:
    words = [*on("topk", density=0.05), *SAVING, "--train.steps", "4"]
    train_job(tmp_path, 4, *words, *HSDP)
    saved = errors(tmp_path / "run", 4)
    ranks, replicas = math.prod(degrees.values()), degrees.get("dp_replicate", 1)
    capfd.readouterr()
    held = train_job(tmp_path, ranks, *words, *mesh(**degrees), "--train.steps", "5", run=_held).weights
    assert {name.rpartition(" ")[0] for name in held} == saved.keys()
    for name, own in saved.items():
        total = sum(held[f"{name} {place}"] for place in range(replicas))
        torch.testing.assert_close(total, own.sum(0), rtol=1e-6, atol=1e-9)
        if replicas == 2:
            assert all(held[f"{name} {place}"].equal(own[place]) for place in range(2))
    told = "dp_replicate: 2 ranks had tensors of their own; their sum is shared among"
    assert (told in capfd.readouterr().out) == (replicas != 2)


@pytest.mark.parametrize(
    "degrees", [{}, swept_case({"dp_replicate": 2, "pp": 2})], ids=["one rank", "pp 2, a tied head"]
)
def test_what_is_not_compressed_here_is_paid_with_the_first_step(degrees: dict[str, int], tmp_path: Path) -> None:
    """With rate 1: the weights are lower by the errors than those of a run that goes on without the plugin."""
    same = (*LR_1, *TIED, *SAVING, "--checkpoint.every", "1")
    words = on("topk", density=0.1)
    for name in ("paid", "without"):
        train_job(tmp_path, 2, *same, *words, *mesh(dp_replicate=2), "--train.steps", "1", name=name)
    owed = errors(tmp_path / "paid", 1)
    ranks = math.prod(degrees.values())
    train_job(tmp_path, ranks, *same, *words, *mesh(**degrees), "--train.steps", "2", name="paid")
    train_job(tmp_path, ranks, *same, *mesh(**degrees), "--train.steps", "2", name="without")
    paid, without = (weights(tmp_path / name, 2) for name in ("paid", "without"))
    assert owed.keys() == {name for name, weight in paid.items() if weight.ndim > 1}
    for name in owed if not degrees else ("embed.weight",):
        torch.testing.assert_close(paid[name], without[name] - owed[name].sum(0), rtol=1e-5, atol=2e-7, msg=name)
    assert degrees or not errors(tmp_path / "paid", 2)


def test_factors_begin_anew_at_another_layout(tmp_path: Path, capfd) -> None:
    words = [*on("powersgd", rank=2), *SAVING, *mesh(dp_replicate=2)]
    train_job(tmp_path, 2, *words, "--train.steps", "4")
    train_job(tmp_path, 4, *words, *mesh(dp_shard=2), "--train.steps", "6")
    said = "the factors of dp_replicate 2, rank 2 begin anew on dp_replicate 2 x dp_shard 2, rank 2"
    assert said in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (on("powersgd", rank=999), "warning: [plugins.compressed_gradients] rank = 999: factors would be no smaller"),
        (on("sign", warmup_steps=2), "warning: [plugins.compressed_gradients] warmup_steps = 2 and train.steps = 2"),
        ([*on("powersgd", rank=4), PLUGIN + "warmup_steps", "1"], ""),
    ],
)
def test_options_that_leave_nothing_compressed_are_told(words: list[str], said: str, tmp_path: Path, capfd) -> None:
    train_job(tmp_path, 2, *words, *mesh(dp_replicate=2), "--train.steps", "2")
    told = [line for line in capfd.readouterr().out.splitlines() if "warning: [plugins.compressed_gradients]" in line]
    assert len(told) == bool(said) and all(said in line for line in told)


# --- steps of a run --------------------------------------------------------------------------------------


def _add_up(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: after each step, gradients so far are what has arrived and what replicas have left, all in sums."""
    from titan.training import trainer

    run, technique = _built(folder, words, config)
    parameters = {name: p for part in run.parts for name, p in part.parameters()}
    given, arrived = ({name: torch.zeros_like(_shard(p)) for name, p in parameters.items()} for _ in range(2))
    exchange, group = technique.after_backward, run.context.mesh.group("dp_replicate")

    def of_replicas(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    def watched() -> None:
        for name, parameter in parameters.items():
            given[name] += of_replicas(_shard(parameter.grad))
        exchange()
        for name, parameter in parameters.items():
            arrived[name] += _shard(parameter.grad)

    technique.after_backward = watched  # type: ignore[method-assign]
    batches = iter(run.loader)
    for _ in range(4):
        trainer.step(run, next(batches))
        held = technique.state_dict()["errors"]
        for name in parameters:
            left = of_replicas(_shard(held[name])) if name in held else 0
            torch.testing.assert_close(arrived[name] + left, given[name], rtol=1e-5, atol=1e-6, msg=name)
    trainer.close(run)
    return {}


def _shard(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


@pytest.mark.parametrize("method", but_sweep(ALL, "randk", "int8", "sign", "powersgd"))
def test_after_each_step_what_arrived_and_what_is_left_add_up(method: str, tmp_path: Path) -> None:
    train_job(tmp_path, 4, *HSDP, *on(method, rank=2, warmup_steps=1), run=_add_up)


def _after_a_nan(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: errors before and after a step in which one rank of the last replica has a gradient of NaN."""
    from titan.training import trainer

    run, technique = _built(folder, words, config)
    compute = run.engine.forward_backward

    def held() -> dict[str, Tensor]:
        flat = {name: _shard(error).clone() for name, error in technique.state_dict()["errors"].items()}
        return flat | {"factors": technique.state_dict().get("factors", {}).get("flat", torch.zeros(1)).clone()}

    def broken(batches: Any) -> None:
        compute(batches)
        if dist.get_rank() == dist.get_world_size() - 1 and run.step == 1:
            _, parameter = next(iter(run.parts[0].parameters()))
            _shard(parameter.grad).view(-1)[0] = math.nan

    run.engine.forward_backward = broken
    batches = iter(run.loader)
    trainer.step(run, next(batches))
    before = held()
    trainer.step(run, next(batches))
    (dropped, _), _ = run.guard.read()
    after = held()
    trainer.step(run, next(batches))
    assert dropped == run.guard.read()[0].dropped == 1
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    assert all(e.isfinite().all() for e in held().values()) and any(e.any() for e in before.values())
    trainer.close(run)
    return {}


@pytest.mark.parametrize("method", ["powersgd", "sign", swept_case("randk")])
def test_a_step_that_is_not_finite_leaves_errors_as_they_were(method: str, tmp_path: Path) -> None:
    train_job(tmp_path, 4, *HSDP, *on(method, rank=2), "--train.non_finite", "skip", run=_after_a_nan)
