"""The host's own sections of a TOML, a dataclass and a line of `Sections` each. Plugins declare theirs themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_type_hints

from titan.contracts.plugin.options import REQUIRED, option

RESUME = ("auto", "required", "never")
"""Values of `[checkpoint] resume` that are no folder."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """`[run]`: what the run is called, where it writes, and what makes it repeatable."""

    name: str = option("", "folder of the run under `dir`; the config file's name when empty")
    dir: str = option("runs", "folder that holds the runs", path=True)
    seed: int = option(0, "seed of weights, data order and PyTorch's default generators", at_least=0)
    deterministic: bool = option(False, "make two runs of one layout bit-identical; slower on GPUs")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "device to train on; auto: the GPU if there is one")
    max_minutes: float = option(
        0.0, "save a checkpoint and exit with code 75 after this time; 0: no limit", unit="minutes", at_least=0
    )
    sample_prompt: str = option("", "prompt that the model continues when training ends; empty: no sample is printed")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """`[train]`: how long and in what batches. The global batch is the one source of truth."""

    steps: int = option(REQUIRED, "optimizer steps of the whole run", at_least=1)
    global_batch_size: int = option(
        REQUIRED, "samples per step, over all ranks", unit="sequences", at_least=1, at_most=10**9
    )
    micro_batch_size: int = option(
        0,
        "samples per forward pass per rank; 0: the rank's whole share of the global batch, or with pipeline "
        "parallelism the largest size that gives two micro batches per stage",
        unit="sequences",
        at_least=0,
    )
    grad_clip: float = option(1.0, "clip the global gradient norm to this value; 0: no clipping", at_least=0)
    non_finite: Literal["stop", "skip"] = option(
        "stop", "when the loss or a gradient is NaN or inf: skip the update, then stop the run or continue (skip)"
    )
    non_finite_limit: int = option(
        10, 'with non_finite = "skip": stop after this many skipped updates in a row', at_least=1
    )
    gc_every: int = option(
        50, "run Python's garbage collector on all ranks at once, every N steps", unit="steps", at_least=1
    )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """`[data]`: how tokens become samples. The dataset's own keys stand in the same table, or in `[[data.mixture]]`."""

    seq_len: int = option(REQUIRED, "length of a sample", unit="tokens", at_least=2)
    packing: Literal["concat", "document_mask", "pad"] = option(
        "concat",
        "concat: documents end to end, cut every seq_len; document_mask: the same, and attention stays within a "
        "document; pad: one document per sample",
    )
    shuffle: bool = option(True, "shuffle the samples of each epoch, seeded by run.seed")
    cache: str = option("~/.cache/titan", "folder of tokenized text, shared by all runs", path=True)
    max_lost: float = option(
        0.01, "largest share of a text's bytes that the tokenizer may lose, by a sample of it", at_least=0, at_most=1
    )
    workers: int | None = option(
        None, "data loader processes per rank; 0: none; unset: 2 on a GPU, 0 on a CPU", at_least=0, at_most=1024
    )
    prepare_workers: int = option(0, "processes that tokenize; 0: one per CPU core", at_least=0, at_most=1024)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """`[checkpoint]`: when to save, which checkpoints to keep, where to resume from."""

    enabled: bool = option(True, "save checkpoints and resume from them")
    every: int = option(1000, "save a checkpoint every N steps, and at the end", unit="steps", at_least=1)
    keep_latest: int = option(2, "complete checkpoints to keep, the newest of the branch; 0 keeps all", at_least=0)
    init_from: str = option(
        "", "initial weights of a new run: a checkpoint, a run or a Hugging Face folder; empty: random", path=True
    )
    reset_data: bool = option(
        False, "keep the weights and start the data at its first sample; without it, changed data is refused"
    )
    change_tokenizer: bool = option(
        False, "use the weights with another tokenizer than the one they were trained with; without it, that is refused"
    )
    resume: str = option(
        "auto",
        '"auto": from the newest checkpoint, if there is one; "required": fail if there is none; "never"; or a folder',
        path=True,
        words=RESUME,
    )
    asynchronous: bool = option(True, "write checkpoints in the background, from a copy in host memory", key="async")

    @property
    def goes_on(self) -> bool:
        """Whether running the same command again resumes from the newest checkpoint."""
        return self.enabled and self.resume in ("auto", "required")


@dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """`[metrics]`: how often to measure. Each tracker has a table of its own below it."""

    every: int = option(10, "steps between logged rows", unit="steps", at_least=1)
    peak_tflops: float = option(
        0.0, "dense peak of a device at the run's precision, for MFU; 0: look it up", unit="TFLOP/s", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class CommSection:
    """`[comm]`: process groups."""

    init_timeout_s: float = option(
        1800.0, "timeout of collectives until the first step is done", unit="s", above=0, at_most=1e6
    )
    timeout_s: float = option(300.0, "timeout of collectives after the first step", unit="s", above=0, at_most=1e6)
    checkpoint_timeout_s: float = option(
        1800.0, "timeout of a checkpoint load or save; it ends the run with all stacks", unit="s", above=0, at_most=1e6
    )


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """`[validation]`: loss on the validation split while training. The dataset's own keys stand in the same table."""

    every: int = option(0, "validate every N steps, and at the end; 0: never", unit="steps", at_least=0)
    samples: int = option(256, "samples of seq_len tokens per validation, the same each time; 0: all", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Sections(Protocol):
    """The host's sections by name, declared here alone: parsing, the JSON Schema and fields of `Job` follow."""

    run: RunSection
    train: TrainSection
    data: DataSection
    checkpoint: CheckpointSection
    validation: ValidationSection
    metrics: MetricsSection
    comm: CommSection


SECTIONS: Mapping[str, type] = get_type_hints(Sections)
