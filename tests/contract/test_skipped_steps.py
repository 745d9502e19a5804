"""A skipped step changes nothing: of every plugin with state, checkpoints before and after it, bit for bit."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.test_every_plugin import EVERY, WORDS, job_file
from tests.jobs import MOE, mesh, of_each_worker
from titan.contracts import Model, Optimizer, Technique
from titan.contracts.plugin.registry import Plugin
from titan.testing.contract import Subject
from titan.testing.jobs import run_job, saved_tensors, train_job

SAVING = ("--checkpoint.enabled", "true", "--checkpoint.every", "1", "--checkpoint.keep_latest", "0")
SKIPPING = ("--train.non_finite", "skip", "--train.steps", "4", *SAVING)
STATEFUL: Mapping[str, tuple[str, ...]] = {
    "compressed_gradients": ("--plugins.compressed_gradients.warmup_steps", "1"),
    "gossip": ("--plugins.gossip.tracking", "true", "--plugins.gossip.momentum", "0.9"),
    "local_steps": ("--plugins.local_steps.every", "2", "--plugins.local_steps.outer", "nesterov"),
    "bf16": ("--plugins.bf16.pure", "true", "--plugins.bf16.rounding", "kahan"),
    "offload": ("--plugins.offload.optimizer", "true"),
    "sgd": ("--optimizer.momentum", "0.9"),
}
"""Options with which a plugin has the most state. Local steps exchange at steps 2 and 4."""
MOVES: Mapping[str, tuple[str, ...]] = {"fp16": ("scale", "updates")}
"""State of techniques that a skipped step is to move."""
REFUSES = ("update_in_backward",)


def run_with_nan(steps: Mapping[int, int | None], what: str, folder: str, words: list[str], config: str) -> Any:
    """On one rank: train the job. At these steps the loss and all gradients are NaN on a rank, or on all (None).

    what: "loss": the loss alone, and gradients are what they should be.
    """
    import torch.distributed as dist

    from titan.training.engine import StepLoss

    begin, begun = StepLoss.begin, iter(range(1, 1000))

    def spoilt(self: StepLoss, tokens: Tensor) -> None:
        step = next(begun)
        now = step in steps and steps[step] in (None, dist.get_rank())
        begin(self, tokens * torch.nan if now and what == "gradients" else tokens)
        self.reported += torch.nan if now else 0.0

    StepLoss.begin = spoilt  # type: ignore[method-assign]
    return run_job(folder, words, config)


def train(*args: Any, config: Path, steps: Mapping[int, int | None], what: str = "gradients") -> list[Path]:
    """The checkpoints of steps 1 to 4 of a job."""
    outcome = train_job(*args, *SKIPPING, config=config, run=partial(run_with_nan, steps, what))
    assert outcome.rows[4]["skipped_updates"] >= len(steps), "each worker counts its own"
    return [outcome.folder / "checkpoints" / f"step-{step:08}" for step in range(1, 5)]


def moved(before: Path, after: Path) -> set[str]:
    """Names of tensors that differ between two checkpoints."""
    one, two = saved_tensors(before), saved_tensors(after)
    assert one.keys() == two.keys()
    return {name for name in one if not torch.equal(one[name], two[name])}


def stateful() -> Iterator[Any]:
    """Optimizers, techniques with state of their own or of the optimizer, and models that act between steps."""
    hooks = ((Technique, "state_dict"), (Technique, "optimizer"), (Model, "after_step"))
    for plugin in EVERY:
        acts = any(
            issubclass(plugin, kind) and getattr(plugin, hook) is not getattr(kind, hook) for kind, hook in hooks
        )
        if (acts or issubclass(plugin, Optimizer)) and plugin.name not in REFUSES:
            # The host does not step an optimizer that cannot skip by itself.
            skips = not issubclass(plugin, Optimizer) or plugin.takes_grad_scale
            yield pytest.param(plugin, id=plugin.name, marks=() if skips else pytest.mark.sweep)


@pytest.mark.parametrize("plugin", list(stateful()))
def test_a_skipped_step_changes_nothing(plugin: type[Plugin], tmp_path: Path) -> None:
    """Step 3, in which NaN comes from the loss of each rank; step 4 is made, and leaves nothing that is not finite."""
    subject = Subject(plugin, (*WORDS.get(plugin.name, ()), *STATEFUL.get(plugin.name, ())), job_file(plugin))
    _, before, after, last = train(tmp_path, subject.ranks, *subject.on, config=subject.config, steps={3: None})
    changed = moved(before, after)
    assert changed == {f"rest.techniques.{plugin.name}.{name}" for name in MOVES.get(plugin.name, ())}, changed
    assert any(name.startswith("model.") for name in moved(after, last)), "an update that is made changes weights"
    bad = [name for name, tensor in saved_tensors(last).items() if not tensor.float().isfinite().all()]
    assert not bad, bad


def test_a_loss_that_is_not_finite_skips_what_techniques_do_before_the_update(tmp_path: Path) -> None:
    """Gradients are finite, and so is their norm: what is tracked must not take them in."""
    words = [*mesh(worker=2), "--plugins.gossip.enabled", "true", *STATEFUL["gossip"]]
    _, before, after, _ = train(tmp_path, 2, *words, config=job_file(Technique), steps={3: None}, what="loss")
    assert not moved(before, after)


def test_each_worker_skips_its_own_steps(tmp_path: Path) -> None:
    """Weights, AdamW's state, a router's bias and averages of one worker stay, and those of the other move."""
    words = [*mesh(worker=2), "--plugins.local_steps.every", "4", "--plugins.ema.decay", "0.5"]
    words += ["--model.balance_rate", "0.01"]
    paths = train(tmp_path, 2, *words, config=MOE, steps={2: 1, 3: 0})
    names = ("model.layers.1.ffn.router.bias", "model.layers.0.attn.wq.weight", "optimizer.norm.weight.exp_avg")
    names += ("optimizer.norm.weight.step", "rest.techniques.ema.weights.norm.weight")
    for name in names:
        (one, other), (still, moving), (moves, stays) = (of_each_worker(path, name) for path in paths[:3])
        assert torch.equal(other, moving) and not torch.equal(one, still), name
        assert torch.equal(still, moves) and not torch.equal(moving, stays), name
