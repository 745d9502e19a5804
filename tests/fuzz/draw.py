"""A job from (seed, index): first one that is meant to be legal, then, now and then, spoilt."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan.config.job import choose_micro_batch
from titan.plugins.parallel.pipeline.stages import ONE_STAGE, SPLIT_BACKWARD, V_SHAPED, takes

Keys = dict[str, Any]

AXES = ("dp_replicate", "dp_shard", "tp", "pp")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
RANKS = {1: 8, 2: 28, 3: 8, 4: 32, 5: 3, 6: 9, 7: 2, 8: 10}
"""World sizes by how often they are drawn, in percent."""
HEADS = ((1, 1), (2, 1), (3, 3), (4, 2), (4, 4), (5, 5), (6, 2), (6, 3), (6, 6), (7, 7), (8, 4), (8, 8), (10, 5))
"""Query and key-value heads. Every degree of tp up to 8 divides some of them."""
SPOILT = 0.15
"""Share of jobs that are spoilt."""


@dataclass(frozen=True)
class Drawn:
    """A job. `curve` holds what the run is a function of, `layout` how it is run; keys are `table.key`.

    spoilt: what was changed without asking whether it is legal; nothing in a job that must be taken.
    """

    seed: int
    index: int
    ranks: int
    curve: Mapping[str, Any]
    layout: Mapping[str, Any]
    spoilt: tuple[str, ...] = ()

    @property
    def features(self) -> frozenset[str]:
        """What the job has, in words that can be counted."""
        return _features(self.ranks, {**self.curve, **self.layout})


def words(keys: Mapping[str, Any]) -> list[str]:
    """Keys as words of a command line."""
    return [word for key, value in keys.items() for word in (f"--{key}", _text(value))]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def draw(seed: int, index: int) -> Drawn:
    """The job of this number: the same on every machine."""
    rng = random.Random(f"{seed}/{index}")
    ranks = rng.choices(list(RANKS), list(RANKS.values()))[0]
    degrees = _degrees(rng, ranks)
    layout: Keys = {f"mesh.{axis}": degree for axis, degree in degrees.items() if degree > 1}
    layers, pipeline = _pipeline(rng, degrees["pp"])
    tensor = _tensor(rng, degrees["tp"])
    batch, micro = _batch(rng, degrees, pipeline)
    layout |= {f"plugins.pipeline.{key}": value for key, value in pipeline.items()}
    layout |= {f"plugins.tensor.{key}": value for key, value in tensor.items()}
    layout |= micro | _shard(rng, degrees, pipeline) | _block(rng, degrees, pipeline)
    if rng.random() < 0.03:
        layout["data.workers"] = 1
    if rng.random() < 0.03:
        layout["run.deterministic"] = True
    curve = _model(rng, degrees, layers) | _data(rng, degrees["tp"], tensor) | batch
    curve["model.max_seq_len"] = curve["data.seq_len"] + rng.choice((0, 0, 3))
    if rng.random() >= SPOILT:
        return Drawn(seed, index, ranks, curve, layout)
    job = _Job(ranks, curve, layout)
    spoilt = tuple(rng.sample(list(FAULTS), rng.choice((1, 1, 2))))
    for fault in spoilt:
        FAULTS[fault](rng, job)
    return Drawn(seed, index, job.ranks, job.curve, job.layout, spoilt)


# --- what is meant to be legal ------------------------------------------------------------------------------------


def _degrees(rng: random.Random, ranks: int) -> dict[str, int]:
    degrees = dict.fromkeys(AXES, 1)
    for prime in (2, 3, 5, 7):
        while ranks % prime == 0:
            degrees[rng.choice((*AXES, "tp"))] *= prime
            ranks //= prime
    return degrees


def _pipeline(rng: random.Random, pp: int) -> tuple[int, Keys]:
    """Number of layers, and options of the pipeline."""
    if pp == 1:
        return rng.choice((1, 1, 2, 2, 3)), {}
    schedule = rng.choice(SCHEDULES)
    keys: Keys = {} if schedule == "1F1B" and rng.random() < 0.5 else {"schedule": schedule}
    each = 1 if schedule in ONE_STAGE else 2
    if schedule not in (*ONE_STAGE, *V_SHAPED) and rng.random() < 0.4:
        each = rng.choice((1, 2, 3) if pp <= 3 else (1, 2))
        keys["virtual_stages"] = each
    stages = pp * each
    layers = stages + rng.choice((0, 1, 1, 2))
    if layers > stages and rng.random() < 0.5:
        points = sorted(rng.sample(range(1, layers), stages - 1))
        keys["split_points"] = tuple(f"layers.{point}" for point in points)
    return layers, keys


def _tensor(rng: random.Random, tp: int) -> Keys:
    if tp == 1:
        return {}
    options = ("sequence_parallel", "loss_parallel")
    return {key: rng.random() < 0.5 for key in options if rng.random() < 0.6}


def _batch(rng: random.Random, degrees: Mapping[str, int], pipeline: Keys) -> tuple[Keys, Keys]:
    ranks, pp, schedule = degrees["dp_replicate"] * degrees["dp_shard"], degrees["pp"], pipeline.get("schedule", "1F1B")
    micro = rng.choice((1, 1, 2, 3) if ranks < 4 else (1, 1, 2))
    most = 4 if pp == 1 else 2 * pp + 2
    fitting = [count for count in range(1, most + 1) if pp == 1 or takes(schedule, pp, count)]
    share = micro * rng.choice(fitting)
    chosen = choose_micro_batch(share, pp)
    silent = rng.random() < 0.3 and (pp == 1 or takes(schedule, pp, share // chosen))
    return {"train.global_batch_size": share * ranks}, {} if silent else {"train.micro_batch_size": micro}


def _shard(rng: random.Random, degrees: Mapping[str, int], pipeline: Keys) -> Keys:
    """Options of fsdp; where nothing asks for it, it may wrap all the same."""
    if degrees["dp_shard"] == 1 and rng.random() < 0.7:
        return {}
    whole = pipeline.get("schedule") in SPLIT_BACKWARD
    stage = rng.choice((None, 1) if whole else (None, 1, 2, 3))
    if stage is None:
        return {} if degrees["dp_shard"] > 1 else {"plugins.fsdp.enabled": True}
    return {"plugins.fsdp.zero_stage": stage}


def _block(rng: random.Random, degrees: Mapping[str, int], pipeline: Keys) -> Keys:
    """What is put around blocks: recomputing, compiling."""
    keys: Keys = {}
    whole = pipeline.get("schedule") not in SPLIT_BACKWARD
    mode = rng.choice((None, None, None, "full", "every_n", *(["selective"] if whole else [])))
    if mode is not None:
        keys["plugins.activation_checkpoint.mode"] = mode
    if mode == "every_n":
        keys["plugins.activation_checkpoint.every"] = rng.choice((1, 2, 3))
    if whole and rng.random() < (0.2 if degrees["tp"] > 1 else 0.06):
        alone = max(degrees.values()) == 1  # each rank compiles, which takes long
        keys["plugins.compile.backend"] = "inductor" if alone or rng.random() < 0.1 else "aot_eager"
    return keys


def _model(rng: random.Random, degrees: Mapping[str, int], layers: int) -> Keys:
    family, tp = rng.choice(("llama", "llama", "gpt")), degrees["tp"]
    sizes = [
        (heads, kv, width)
        for heads, kv in HEADS
        for width in range(2, 13, 2 if family == "llama" else 1)
        # A norm over few features turns rounding into large gradients.
        if heads % tp == kv % tp == 0 and 12 <= heads * width <= 48
    ]
    uneven = [size for size in sizes if size[0] * size[2] % degrees["dp_shard"]]
    heads, kv, width = rng.choice(uneven if uneven and rng.random() < 0.5 else sizes)
    ffn = rng.choice([width for width in range(3, 61) if (tp - 1) * -(-width // tp) < width])
    return {
        "model.name": family, "model.n_layers": layers, "model.dim": heads * width, "model.n_heads": heads,
        "model.n_kv_heads": kv, "model.ffn_dim": ffn, "model.vocab_size": rng.choice((251, 251, 64, 97)),
        "model.tied": rng.random() < 0.4, "model.init_std": rng.choice((0.02, 0.1, 0.2)),
    }  # fmt: skip


def _data(rng: random.Random, tp: int, tensor: Keys) -> Keys:
    step = tp if tensor.get("sequence_parallel", True) else 1
    keys: Keys = {
        "data.seq_len": step * rng.randint(-(-4 // step), 24 // step),
        "data.packing": rng.choice(("concat", "document_mask", "document_mask", "pad")),
        "data.path": rng.choice(("lively", "barren")),
        "data.shuffle": rng.random() < 0.5,
        "run.seed": rng.choice((0, 1, 2)),
        "train.grad_clip": rng.choice((0, 0.1, 1)),
    }
    if rng.random() < 0.2:
        keys["loss.z_loss"] = 0.01
    if rng.random() < 0.2:
        keys |= {"validation.every": 2, "validation.name": "shards", "validation.samples": rng.randint(1, 9)}
    return keys


# --- what is spoilt -----------------------------------------------------------------------------------------------


@dataclass
class _Job:
    ranks: int
    curve: Keys
    layout: Keys


Fault = Callable[[random.Random, _Job], None]


def _set(part: str, key: str, values: Sequence[Any]) -> Fault:
    def fault(rng: random.Random, job: _Job) -> None:
        getattr(job, part)[key] = rng.choice(values)

    return fault


def _other_ranks(rng: random.Random, job: _Job) -> None:
    job.ranks = rng.choice([ranks for ranks in RANKS if ranks != job.ranks])


def _points(rng: random.Random, job: _Job) -> None:
    count = rng.randint(1, 4)
    job.layout["plugins.pipeline.split_points"] = tuple(f"layers.{rng.randint(0, 6)}" for _ in range(count))


def _both_wrappers(rng: random.Random, job: _Job) -> None:
    job.layout |= {"plugins.ddp.enabled": True, "plugins.fsdp.enabled": True}


def _without(rng: random.Random, job: _Job) -> None:
    job.layout[f"plugins.{rng.choice(('fsdp', 'ddp', 'tensor', 'pipeline'))}.enabled"] = False


def _unknown(rng: random.Random, job: _Job) -> None:
    key = rng.choice(("mesh.tpp", "plugins.fsddp.enabled", "train.microbatch", "plugins.pipeline.sched"))
    job.layout[key] = 2


FAULTS: Mapping[str, Fault] = {
    "degree": lambda rng, job: job.layout.update({f"mesh.{rng.choice(AXES)}": rng.choice((-1, 0, 2, 3, 4))}),
    "ranks": _other_ranks,
    "heads": _set("curve", "model.n_heads", range(1, 10)),
    "kv heads": _set("curve", "model.n_kv_heads", range(1, 10)),
    "width": _set("curve", "model.dim", range(12, 40)),
    "layers": _set("curve", "model.n_layers", range(1, 6)),
    "vocabulary": _set("curve", "model.vocab_size", (11, 12, 13)),
    "feed-forward": _set("curve", "model.ffn_dim", range(1, 5)),
    "sequence": _set("curve", "data.seq_len", range(2, 25)),
    "longest sequence": _set("curve", "model.max_seq_len", range(2, 25)),
    "batch": _set("curve", "train.global_batch_size", range(1, 25)),
    "micro batch": _set("layout", "train.micro_batch_size", range(7)),
    "schedule": _set("layout", "plugins.pipeline.schedule", (*SCHEDULES, "zb")),
    "virtual stages": _set("layout", "plugins.pipeline.virtual_stages", range(5)),
    "split points": _points,
    "zero stage": _set("layout", "plugins.fsdp.zero_stage", range(5)),
    "compile": _set("layout", "plugins.compile.backend", ("aot_eager",)),
    "recompute": _set("layout", "plugins.activation_checkpoint.mode", ("full", "every_n", "selective")),
    "sequence split": _set("layout", "plugins.tensor.sequence_parallel", (True, False)),
    "two wrappers": _both_wrappers,
    "switched off": _without,
    "unknown key": _unknown,
}


# --- what a job has -----------------------------------------------------------------------------------------------

COUNTED = (
    "model.name", "model.vocab_size", "data.packing", "data.path", "data.workers", "train.grad_clip",
    "validation.every", "plugins.tensor.sequence_parallel", "plugins.tensor.loss_parallel",
    "plugins.pipeline.schedule", "plugins.pipeline.virtual_stages", "plugins.fsdp.zero_stage",
    "plugins.activation_checkpoint.mode", "plugins.compile.backend",
)  # fmt: skip
"""Keys whose values are counted where a job has them."""


def _features(ranks: int, keys: Mapping[str, Any]) -> frozenset[str]:
    of = keys.get
    degrees = {axis: of(f"mesh.{axis}", 1) for axis in AXES}
    split = {axis for axis, degree in degrees.items() if degree > 1}
    batch_ranks = max(1, degrees["dp_replicate"] * degrees["dp_shard"])
    whether = {
        "hsdp": {"dp_replicate", "dp_shard"} <= split,
        "dp x tp x pp": {"tp", "pp"} <= split and batch_ranks > 1,
        "dim does not divide over dp_shard": "dp_shard" in split and of("model.dim") % degrees["dp_shard"],
        "6 heads, 3 kv heads": (of("model.n_heads"), of("model.n_kv_heads")) == (6, 3),
        "5 layers over 4 stages": of("model.n_layers") == 5 and degrees["pp"] == 4,
        "split_points": of("plugins.pipeline.split_points"),
        "tied head": of("model.tied"),
        "tied over stages": of("model.tied") and "pp" in split,
        "accumulation": "pp" not in split
        and 0 < of("train.micro_batch_size", 0) < of("train.global_batch_size") // batch_ranks,
    }
    found = {name for name, there in whether.items() if there}
    found |= {f"{ranks} ranks", *(f"{axis} > 1" for axis in split)}
    return frozenset(found | {f"{key.rpartition('.')[2]} {_text(keys[key])}" for key in COUNTED if key in keys})
