"""The order in which techniques transform the model, and why.

convert      first, while modules are plain and on the meta device: replacing Linear modules must reach all of them.
split        then, so that all later phases see only the stages of this rank.
partition    tensor, sequence and expert slices: they replace parameters, so before anything wraps or captures them.
recompute    chooses what a block saves; the compiler must see the choice, and sharding must see the recomputed calls.
compile      block by block, after the arithmetic is final and before hooks that a graph cannot hold.
shard        last of the wrappers: data-parallel hooks sit outside of blocks, gather what partition left, reduce once.
materialise  storage and initial values, when every tensor has the shape and owner it will keep.

Within a phase the order is the TOML's.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import nn

from titan.contracts import Batch, BuildContext, Engine, ModelPart, Phase, Technique
from titan.contracts.base.spec import glob_matches
from titan.contracts.plugin.conformance import answer, label
from titan.errors import PluginError
from titan.layers.attention import AttentionCore
from titan.layers.philox import RandomModule
from titan.training.engine import SequentialEngine
from titan.training.init import init_weights

ORDER: tuple[Phase, ...] = get_args(Phase)


def cut(whole: Batch, context: BuildContext) -> Batch:
    """This rank's positions of a micro batch, as the techniques deal with them: the one place that cuts a batch."""
    batch = whole
    for technique in sorted(context.techniques, key=lambda technique: ORDER.index(technique.phase)):
        batch = answer(technique, "batch", Batch, batch)
        shapes = [list(tensor.shape) for tensor in (batch.tokens, batch.labels, batch.positions)]
        if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
            what = "batch() returned tokens, labels and positions of shapes " + ", ".join(map(str, shapes))
            raise PluginError(f"{label(type(technique))}: {what}; cut them alike")
    ranks, length = context.mesh.layout.degree_of("sliced"), whole.tokens.shape[1]
    if batch.tokens.shape[1] * ranks != length:
        raise PluginError(
            f"{batch.tokens.shape[1]} of {length} positions are left to each of {ranks} ranks that slice sequences; "
            f"batch() of the technique that owns their axis must return 1 in {ranks}"
        )
    return batch


def reducing(techniques: Sequence[Technique]) -> list[Technique]:
    """Techniques in the order in which `after_backward` is called.

    First those with a loss scale: what they divide by then, nobody sees in a gradient. Then those that own or cover
    axes, the latest phase first, as data-parallel wrappers sum gradients in the backward pass: replicas are summed
    before the copies and halves within each are, which end up with the same bits. Then the others, which see whole
    gradients.
    """

    def place(technique: Technique) -> tuple[int, int]:
        if type(technique).loss_scale is not Technique.loss_scale:
            return 0, 0
        return (1, -ORDER.index(technique.phase)) if technique.axes or technique.covers else (2, 0)

    return sorted(techniques, key=place)


def wrapping(techniques: Sequence[Technique]) -> list[Technique]:
    """The techniques in the order in which they change the optimizer, whatever the TOML's is.

    State in the host's memory comes to the device for what is wrapped, so who brings it wraps the others. Who steps the
    optimizer within the backward pass steps what all of them have made.
    """
    return sorted(techniques, key=lambda t: ("updates_in_backward" in t.facts(), "state_on_host" in t.facts()))


def materialise(parts: Sequence[ModelPart], context: BuildContext) -> None:
    """Storage on the device of this rank, of weights on the host where they are to be, and layout-invariant values."""
    for part in parts:
        part.module.to_empty(device="cpu" if context.job.stating("weights_on_host") else context.device)
        for module in part.module.modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.device != context.device:
                    setattr(module, name, torch.empty_like(buffer, device=context.device))
        part.retie(context.spec)
        init_weights(part, context.spec, context.job.run.seed, context.device)


def assemble(
    context: BuildContext, materialise: Callable[[Sequence[ModelPart], BuildContext], None] = materialise
) -> Engine:
    """Build the model, let the techniques at it in order, give it storage and initial values by `materialise`.

    Returns the engine that runs the parts of this rank.
    """
    with torch.device("meta"):
        model = context.job.model.build()
    for parameter in model.parameters():  # each once, so that tied ones stay one; buffers keep what they are made in
        parameter.data = parameter.data.to(context.precision.store_dtype)
    whole = ModelPart(model)
    engine: Engine = SequentialEngine(whole, context.techniques)
    for phase in ORDER:
        for technique in (each for each in context.techniques if each.phase == phase):
            if phase == "split":
                engine = technique.split(model, context) or engine
                if not hasattr(engine, "parts"):
                    raise PluginError(f"{label(type(technique))}: split() returned {engine!r}, which is no Engine")
            else:
                for part in engine.parts:
                    technique.apply(part, context)
        if phase == "convert":
            check_names(model, context)
        if phase == "split":
            context.parts = engine.parts
            for part in engine.parts:
                part.length_multiple, part.costly = whole.length_multiple, whole.costly
        if phase == "shard":
            materialise(engine.parts, context)
    return engine


def check_names(model: nn.Module, context: BuildContext) -> None:
    """Hold the spec, as techniques have changed it, against the model with what they have put into it.

    They may give values to buffers that they register in a later phase.
    """
    spec, sliced = context.spec, context.mesh.layout.degree_of("sliced") > 1
    if spec.draws and "seeds" not in inspect.signature(type(model).forward).parameters:
        raise PluginError(
            f"the model's spec names modules that draw random numbers, {', '.join(spec.draws)}, but the model's "
            "forward has no argument `seeds` to pass on to them"
        )
    _check_kind(model, RandomModule, "ModelSpec.draws", spec.draws, "its random numbers would depend on the layout")
    passed_by = "techniques that replace attention would pass it by"
    _check_kind(model, AttentionCore, "ModelSpec.attention", spec.attention, passed_by)
    for name, module in model.named_modules():
        if isinstance(module, AttentionCore) and module.operation is None and sliced:
            raise PluginError(f"no technique gave {name} an operation that reaches the positions of other ranks")
    own = context.job.model.spec().buffers if spec.buffers else {}
    replace(spec, buffers={glob: how for glob, how in spec.buffers.items() if glob in own}).check_names(
        (name for name, _ in model.named_modules()),
        (name for name, _ in model.named_parameters()),
        (name for name, _ in model.named_buffers(remove_duplicate=False)),
    )


def _check_kind(model: nn.Module, kind: type[nn.Module], field: str, globs: Sequence[str], otherwise: str) -> None:
    """The globs of a field of the spec name the modules of this kind and no others."""
    for name, module in model.named_modules():
        named = any(glob_matches(glob, name) for glob in globs)
        if named != isinstance(module, kind):
            article = "an" if kind is AttentionCore else "a"
            missing = f"is {article} {kind.__name__} that no glob of {field} names"
            what = f"is no {kind.__name__}" if named else missing
            raise PluginError(f"the model's spec: {name} {what}, so {otherwise}")
