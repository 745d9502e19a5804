"""Checks that need the whole job: the model's sizes, paths, and what each technique requires."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from titan.config import groups
from titan.config.job import Job
from titan.contracts.base.cost import Attention
from titan.contracts.base.spec import ModelSpec
from titan.contracts.plugin.conformance import sentences
from titan.contracts.plugin.options import Where
from titan.contracts.sections import RESUME
from titan.errors import ConfigError, ConfigIssue, PluginError
from titan.paths import dangling, expanded, undecoded


def check(job: Job, where: Callable[..., Where], *, trains: bool = True) -> None:
    """Run the checks of the model and of the enabled techniques; raises a ConfigError with every fault found.

    where: gives the place of a table by its name's parts.
    trains: whether the job trains; else it uses a model, as generation does.
    """
    faults = [_fault(where("model"), sentence) for sentence in sentences(job.model, "check")]
    faults += [*_unfit_name(job, where("run")), *_absent_folders(job, where("checkpoint"))]
    if not faults:
        try:
            spec, _ = job.spec, job.precision  # both are asked now, so that hooks that return nothing are refused here
        except PluginError as error:
            raise ConfigError(str(error), where().source) from None
        if job.data.seq_len > spec.max_seq_len:
            what = f"= {job.data.seq_len}: must be at most the model's max_seq_len, {spec.max_seq_len}"
            faults.append(where("data").fault("seq_len", what))
        if trains:
            faults += _unfilled(job, spec, where("data"))
        faults += _unsliced(job, spec, where("mesh"))
        faults += groups.check(job.optimizer, job, where) if trains else []
        job.stating("one_backward")  # asked now, so that facts() that states nonsense is refused here
        for technique in job.techniques:
            place = where("plugins", technique.name)
            faults += [_fault(place, sentence) for sentence in sentences(technique, "check", job, spec)]
    if faults:
        raise ConfigError(faults)


def _fault(place: Where, sentence: str) -> ConfigIssue:  # of a table, whose name the sentence may begin with
    return place.fault("", re.sub(rf"^\[{re.escape(place.table)}\]:? ", "", sentence))


def without_effect(job: Job) -> list[str]:
    """A sentence per option of an enabled technique that changes nothing for this model."""
    return [
        f"[plugins.{technique.name}] {sentence}"
        for technique in job.techniques
        for sentence in sentences(technique, "no_effect", job.spec)
    ]


def _unsliced(job: Job, spec: ModelSpec, where: Where) -> Iterator[ConfigIssue]:
    """What keeps axes above 1 from slicing sequences."""
    axes = [axis for axis in job.layout.axes_of("sliced") if job.layout.degree(axis) > 1]
    if not axes:
        return
    if len(axes) > 1:
        yield where.fault(axes[1], f"and mesh.{axes[0]} would both slice sequences; set one of them to 1")
    sliced = f"= {job.layout.degree(axes[0])}: slices sequences, but"
    if not spec.attention:
        yield where.fault(axes[0], f"{sliced} the model names no attention in ModelSpec.attention")
    if spec.whole_sequences:
        yield where.fault(axes[0], f"{sliced} {spec.whole_sequences}")


def _unfilled(job: Job, spec: ModelSpec, where: Where) -> list[ConfigIssue]:
    """An attention window that no sequence fills, so that training does not see it; given weights keep their window."""
    window = max((op.window for op in spec.layer_ops if isinstance(op, Attention)), default=0)
    length = job.data.seq_len
    if window <= length or job.checkpoint.init_from:
        return []
    fits = f"a window of {length}" if window > spec.max_seq_len else f"seq_len {window}, or a window of {length}"
    what = f"= {length}: no sequence fills the model's attention window of {window} positions; nearest that fit: {fits}"
    return [where.fault("seq_len", what)]


def _unfit_name(job: Job, where: Where) -> Iterator[ConfigIssue]:
    """A name that would put the run's files into a folder that is not its own."""
    name = Path(job.run.name)
    for key, value in (("dir", os.path.abspath(job.run.dir)), ("name", job.run.name)):
        if what := undecoded(value):
            yield where.fault(key, what)
    if not name.parts or name.is_absolute() or ".." in name.parts:
        yield where.fault("name", f"= {job.run.name!r}: must be a folder below run.dir")


def _absent_folders(job: Job, where: Where) -> Iterator[ConfigIssue]:
    resume, init_from = job.checkpoint.resume, job.checkpoint.init_from
    if resume == "required" and not job.checkpoint.enabled:
        yield where.fault("resume", "= 'required': but checkpoints are off; set enabled = true")
    if resume not in RESUME and not os.path.exists(path := expanded(resume, "checkpoint.resume")):
        why = dangling(path) or "no such folder"
        known = ", ".join(map(repr, RESUME))
        yield where.fault("resume", f"= {resume!r}: {why}; give one that exists, or one of {known}")
    goes_on = job.checkpoint.goes_on and os.path.isdir(job.folder / "checkpoints")  # and does not read init_from then
    if init_from and not goes_on and not os.path.exists(path := expanded(init_from, "checkpoint.init_from")):
        yield where.fault("init_from", f"= {init_from!r}: {dangling(path) or 'no such folder'}")
