"""Load a trained model for use: from a checkpoint or a Hugging Face folder, on one process or on many ranks.

Only the model, tokenizer, loss, seq_len and packing are read from a checkpoint's config. Layout, precision and data are
set by the user, and plugin folders that an untrusted checkpoint names are never imported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.checkpoint.disk.folder import HF_CONFIG, is_hf, read_hf_config
from titan.checkpoint.ranks import Ranks
from titan.config import Job, load_table
from titan.config.tables import Table, override, plugin_folders
from titan.contracts import BuildContext, Delimiters, Engine, Model, ModelPart
from titan.contracts.plugin import registry
from titan.errors import CheckpointError, ConfigError
from titan.ranks.process import Rank
from titan.training import phases
from titan.training.build import context_of
from titan.weights import load as weights

TAKEN_OVER = ("model", "loss")
TAKEN_OF_DATA = ("seq_len", "packing")
WEIGHTS_HELP = "take the weights that this technique has kept beside those that were trained, which are the default"


@dataclass(frozen=True)
class Trained:
    """A model with its weights on this rank's device. `engine.forward` gives logits; parts[0].module is the model.

    delimiters: ids around texts, as the model has seen them in training.
    """

    job: Job
    rank: Rank
    context: BuildContext
    engine: Engine
    delimiters: Delimiters

    @property
    def parts(self) -> Sequence[ModelPart]:
        """The model parts of this rank, in stage order."""
        return self.engine.parts


def open_job(
    given: str | Path, overrides: Sequence[str], world_size: int, option: str = "--checkpoint"
) -> tuple[Path, Job]:
    """Where the weights lie, and a job that uses them: model and tokenizer of the folder, the rest from `overrides`.
    option: where the user gave the folder, for messages.

    CheckpointError: there are no weights, or no plugin supports their architecture.  ConfigError: the overrides do not
    fit.  PluginError: a plugin that `--plugins.path` names cannot be loaded.
    """
    words = Table()
    override(words, overrides)
    registry.load_plugins(plugin_folders(words))  # first of all: one may be of the folder's architecture
    path = weights.find_weights(given, option)
    if is_hf(path):
        model = model_table(read_hf_config(path), path)
        own = {"model": model, "data": {"seq_len": min(128, int(model.get("max_seq_len", 128)))}}
    else:
        config = weights.stored_rest(path)["config"]
        own = {section: config[section] for section in TAKEN_OVER if section in config}
        own["data"] = {key: value for key, value in config.get("data", {}).items() if key in TAKEN_OF_DATA}
    if (tokenizer := weights.tokenizer_table(path)) is not None:
        own["tokenizer"] = tokenizer
    elif not any(word.startswith("--tokenizer.") for word in overrides):
        raise CheckpointError(f"{path} holds no tokenizer that a plugin can read; name one with --tokenizer.name")
    own |= {"train": {"steps": 1, "global_batch_size": world_size}, "checkpoint": {"enabled": False}}
    job = load_table(own, str(path), overrides, world_size)
    weights.check_tokenizer(path, job.tokenizer, change=job.checkpoint.change_tokenizer)
    return path, job


def model_table(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The `[model]` table of a config.json; CheckpointError where no plugin knows the architecture."""
    for plugin in registry.of_kind(Model.kind):
        assert issubclass(plugin, Model)
        if (values := plugin.from_hf(config)) is not None:
            return {"name": plugin.name, **values}
    unknown = f"no model plugin supports model_type {config.get('model_type')!r}{registry.left_out()}"
    raise CheckpointError(f"{path / HF_CONFIG}: {unknown}")


def delimiters(path: Path, job: Job, bos: bool | None = None) -> Delimiters:
    """The ids around texts that go with some weights.

    Weights as published have seen what their tokenizer states. titan's training puts `end` after each document and
    nothing before it. bos: True, False: start texts as published, or as in training; None: as the weights have it.

    ConfigError: the model has no row for one of them.
    """
    tokenizer, rows = job.tokenizer, job.spec.vocab_size
    around = tokenizer.delimiters
    if is_trained(path):
        around = around._replace(stops=tuple({*around.stops, tokenizer.end}))
        bos = bool(bos)
    if bos is False:
        around = Delimiters(tokenizer.end, (), (), around.stops)
    elif bos and not around.before and around.start != tokenizer.end:
        around = around._replace(before=(around.start,))
    if (highest := max((around.start, *around.before, *around.after))) >= rows:
        what = f"token id {highest} stands before or after texts, but the model's vocab_size is {rows}"
        raise ConfigError(f"[tokenizer] {tokenizer.name!r}: {what}; name an end that it has with --tokenizer.end")
    return around


def is_trained(path: Path) -> bool:
    """Whether titan has trained the weights of a folder. One of Hugging Face's does not say: it counts as published."""
    rest = {} if is_hf(path) else weights.stored_rest(path)
    return bool(rest.get("step") or rest.get("trained"))


def missing_row(ids: Sequence[int], job: Job, owner: str) -> str:
    """Says that the model has no row for one of the ids of a text or a prompt, the owner; empty where it has all."""
    if (highest := max(ids)) < job.spec.vocab_size:
        return ""
    token = f"token id {highest} ({job.tokenizer.decode([highest])!r})"
    what = f"has {token}, but the model's vocab_size is {job.spec.vocab_size}: it has no row for it"
    return f"{what}; set --tokenizer.name if this is not the model's tokenizer, or change {owner}"


def open_trained(path: Path, job: Job, rank: Rank, technique: str = "", bos: bool | None = None) -> Trained:
    """Build the model of a job on this rank and give it the weights of a folder; all ranks together. technique: whose
    weights to take in place of the trained ones.  bos: as `delimiters` has it."""
    context = context_of(job, rank)
    engine = phases.assemble(context)
    weights.load_weights(path, job.model, engine.parts, Ranks(rank.number, rank.world_size), technique)
    return Trained(job, rank, context, engine, delimiters(path, job, bos))
