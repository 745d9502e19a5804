"""The host's own sections of a TOML, one dataclass each. Plugins declare theirs in their own files."""

from dataclasses import dataclass
from typing import Literal

from titan.contracts.base.options import REQUIRED, option

RESUME = ("auto", "required", "never")
"""Values of `[checkpoint] resume` that are no folder."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """`[run]`: what the run is called, where it writes, and what makes it repeatable."""

    name: str = option("", "folder of the run under `dir`; the config file's name when empty")
    dir: str = option("runs", "folder that holds the runs", path=True)
    seed: int = option(0, "seed of weights, data order and PyTorch's default generators", at_least=0)
    deterministic: bool = option(False, "two runs of one layout are bit-identical; slower on GPUs")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to train; auto takes the GPU when there is one")
    max_minutes: float = option(
        0.0, "save and stop with exit code 75 after this long; 0: no limit", unit="minutes", at_least=0
    )
    sample_prompt: str = option(
        "", "prompt that the model continues when training ends; empty: no sample is printed", formerly="sample"
    )


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """`[train]`: how long and in what batches. The global batch is the one source of truth."""

    steps: int = option(REQUIRED, "optimizer updates in all", at_least=1)
    global_batch_size: int = option(
        REQUIRED, "samples a step over all ranks", unit="sequences", at_least=1, at_most=10**9
    )
    micro_batch_size: int = option(
        0,
        "samples per forward on one rank; 0 takes a rank's whole share at once, or under pipelines the most that "
        "leaves two micro batches a stage",
        unit="sequences",
        at_least=0,
    )
    grad_clip: float = option(1.0, "largest global gradient norm; 0 does not clip", at_least=0)
    non_finite: Literal["stop", "skip"] = option(
        "stop", "NaN or inf in loss or gradients: drop the update, and stop the run, or go on with the next batch"
    )
    non_finite_limit: int = option(10, "with skip: stop after so many dropped updates in a row", at_least=1)
    gc_every: int = option(50, "collect garbage on all ranks together every so many steps", unit="steps", at_least=1)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """`[data]`: how tokens become samples. The dataset's own keys stand in the same table, or in `[[data.mixture]]`."""

    seq_len: int = option(REQUIRED, "length of a sample", unit="tokens", at_least=2)
    packing: Literal["concat", "document_mask", "pad"] = option(
        "concat",
        "concat: documents end to end, cut every seq_len; document_mask: the same, and attention stays within a "
        "document; pad: one document per sample",
        former_values={"stream": "concat", "isolate": "document_mask"},
    )
    shuffle: bool = option(True, "a new seeded order of the samples each epoch")
    cache: str = option("~/.cache/titan", "folder of tokenised text, shared by all runs", path=True)
    workers: int = option(0, "loader processes per rank; 0 reads in the training process", at_least=0, at_most=1024)
    prepare_workers: int = option(0, "processes that tokenise; 0 is one a core", at_least=0, at_most=1024)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """`[checkpoint]`: when to save, what to keep, where to go on from."""

    enabled: bool = option(True, "save and resume at all")
    every: int = option(1000, "save every so many steps, and at the end", unit="steps", at_least=1)
    keep_latest: int = option(
        2, "complete checkpoints to keep, the newest ones; 0 keeps all", at_least=0, formerly="keep"
    )
    init_from: str = option(
        "", "a new run's weights: a checkpoint, a run, or a Hugging Face folder; empty: drawn anew", path=True
    )
    reset_data: bool = option(
        False,
        "keep the checkpoint's weights and start the data at its first sample; without it, changed data is refused",
        formerly="new_data",
    )
    resume: str = option(
        "auto",
        '"auto": from the newest checkpoint, if there is one; "required": fail if there is none; "never"; or a folder',
        path=True,
        words=RESUME,
        former_values={"must": "required"},
    )
    asynchronous: bool = option(True, "write in the background from a copy in memory", key="async")

    @property
    def goes_on(self) -> bool:
        """Whether the same command goes on from what it has saved."""
        return self.enabled and self.resume in ("auto", "required")


@dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """`[metrics]`: how often to measure. Each tracker has a table of its own below it."""

    every: int = option(10, "steps between logged rows", unit="steps", at_least=1)
    peak_tflops: float = option(
        0.0,
        "dense peak of one device at the run's precision, for MFU; 0 looks the device up",
        unit="TFLOP/s",
        at_least=0,
    )


@dataclass(frozen=True, kw_only=True)
class CommSection:
    """`[comm]`: process groups."""

    init_timeout_s: float = option(
        1800.0, "longest wait of a collective before the first step is done", unit="s", above=0, at_most=1e6
    )
    timeout_s: float = option(300.0, "longest wait of a collective after that", unit="s", above=0, at_most=1e6)
    checkpoint_timeout_s: float = option(
        1800.0, "longest load or save; then all stacks are shown and the run ends", unit="s", above=0, at_most=1e6
    )


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """`[validation]`: loss on held-out text while training. The dataset's own keys stand in the same table."""

    every: int = option(0, "validate every so many steps, and at the end; 0: never", unit="steps", at_least=0)
    samples: int = option(256, "samples of seq_len tokens used, the same each time; 0: all", at_least=0)
