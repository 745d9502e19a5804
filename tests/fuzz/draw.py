"""A job from (seed, index): first one that is meant to be legal, then, now and then, spoilt."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tests.fuzz import savings
from titan.config.job import choose_micro_batch
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import options_of
from titan.plugins.parallel.pipeline.stages import ONE_STAGE, SPLIT_BACKWARD, V_SHAPED, takes

Keys = dict[str, Any]

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
METHODS = ("ring", "gather", "ulysses")
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


class Model(NamedTuple):
    """What can be drawn of a model: the keys of its options, and whether it has norms of heads."""

    options: frozenset[str]
    head_norms: bool


@cache
def models() -> Mapping[str, Model]:
    """titan's models by name."""
    registry.load_plugins()
    own = [plugin for plugin in registry.of_kind("model") if plugin.__module__.startswith(f"{registry.BUILT_IN}.")]
    return {plugin.name: _model_of(plugin) for plugin in own}


def _model_of(plugin: Any) -> Model:
    styles = plugin(plugin.Config()).spec().tensor.values()
    return Model(
        frozenset(option.key for option in options_of(plugin.Config)), bool({"qk_norm", "wide_norm"} & set(styles))
    )


def draw(seed: int, index: int) -> Drawn:
    """The job of this number: the same on every machine."""
    rng = random.Random(f"{seed}/{index}")
    ranks = rng.choices(list(RANKS), list(RANKS.values()))[0]
    degrees = _degrees(rng, ranks)
    layout: Keys = {f"mesh.{axis}": degree for axis, degree in degrees.items() if degree > 1}
    layers, pipeline = _pipeline(rng, degrees["pp"])
    tensor, context = _tensor(rng, degrees["tp"]), _context(rng, degrees["cp"])
    batch, micro = _batch(rng, degrees, pipeline)
    layout |= {f"plugins.pipeline.{key}": value for key, value in pipeline.items()}
    layout |= {f"plugins.tensor.{key}": value for key, value in tensor.items()}
    layout |= {f"plugins.context.{key}": value for key, value in context.items()}
    layout |= micro | _shard(rng, degrees, pipeline) | _block(rng, degrees, pipeline)
    if rng.random() < 0.03:
        layout["data.workers"] = 1
    if rng.random() < 0.03:
        layout["run.deterministic"] = True
    data = _data(rng, degrees, tensor, context)
    curve = _model(rng, degrees, context, layers, data["data.seq_len"]) | data | batch
    curve |= _noise(random.Random(f"{seed}/{index}/noise"), curve["model.name"])
    if "n_experts" in models()[curve["model.name"]].options:
        curve |= _experts(random.Random(f"{seed}/{index}/experts"), degrees, layers)
        curve |= _padding(random.Random(f"{seed}/{index}/padding"))
        layout |= _shared(random.Random(f"{seed}/{index}/shared"), degrees, curve["model.n_experts"])
    if "mesh.ep" in layout:
        layout.pop("plugins.compile.backend", None)
    savings.save(random.Random(f"{seed}/{index}/savings"), curve, layout)
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
            degrees[rng.choice((*AXES, "cp", "tp"))] *= prime
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


def _context(rng: random.Random, cp: int) -> Keys:
    if cp == 1:  # it may be on all the same
        return {"enabled": True} if rng.random() < 0.04 else {}
    method = rng.choice(METHODS)
    return {} if method == "ring" and rng.random() < 0.5 else {"method": method}


def _pieces(cp: int, context: Keys) -> int:
    """What the length of a sequence is a multiple of."""
    return cp if cp == 1 or context.get("method") == "ulysses" else 2 * cp


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


def _model(rng: random.Random, degrees: Mapping[str, int], context: Keys, layers: int, length: int) -> Keys:
    several = [name for name, model in models().items() if "n_experts" in model.options]
    family, tp = rng.choice([*models(), *several]), degrees["tp"]  # an axis is for them alone
    has, head_norms = models()[family]
    shards = degrees["dp_shard"] * degrees["cp"]
    dealt = degrees["cp"] if context.get("method") == "ulysses" else 1
    turned = "rope_theta" in has  # rotary embeddings turn pairs of features
    sizes = [
        (heads, kv, width)
        for heads, kv in HEADS
        # A norm over few features turns rounding into large gradients.
        for width in range(6 if head_norms else 2, 13, 2 if turned else 1)
        if heads % tp == kv % tp == 0 and 12 <= heads * width <= 48 and _dealt(heads // tp, kv // tp, dealt)
    ]
    uneven = [size for size in sizes if size[0] * size[2] % shards]
    heads, kv, width = rng.choice(uneven if uneven and rng.random() < 0.5 else sizes)
    ffn = rng.choice([width for width in range(3, 61) if (tp - 1) * -(-width // tp) < width])
    keys: Keys = {"name": family, "n_layers": layers, "dim": heads * width, "n_heads": heads}
    keys |= {"n_kv_heads": kv, "ffn_dim": ffn, "vocab_size": rng.choice((251, 251, 64, 97))}
    keys |= {"max_seq_len": length + rng.choice((0, 0, 3)), "tied": rng.random() < 0.4}
    keys |= {"init_std": rng.choice((0.02, 0.1, 0.2))}
    if "head_dim" in has and rng.random() < 0.5:
        keys["head_dim"] = rng.choice((6, 8, 10))
    if "rotary_pct" in has:
        keys["rotary_pct"] = rng.choice(range(2, width + 1, 2)) / width
    if "attention_cap" in has:  # blocks of keys that are passed round or gathered have no soft caps
        keys["attention_cap"] = rng.choice((0.0, 2.0)) if dealt == degrees["cp"] else 0.0
        keys |= {"logit_cap": rng.choice((0.0, 3.0)), "sliding_window": length}
    if "sliding_window" in has and rng.random() < 0.4:
        keys["sliding_window"] = rng.randint(1, length)
    return {f"model.{key}": value for key, value in keys.items()}


def _noise(rng: random.Random, family: str) -> Keys:
    """Dropout or jitter, from a generator of its own: a job is otherwise the one that it was before these."""
    has = models()[family].options
    return {
        f"model.{key}": rng.choice((0.1, 0.3))
        for key in ("dropout", "router_jitter")
        if key in has and rng.random() < 0.4
    }


def _experts(rng: random.Random, degrees: Mapping[str, int], layers: int) -> Keys:
    """Sizes of a mixture of experts, and what balances it."""
    experts = rng.choice((2, 4, 4, 6, 8, 12))
    balances = ("bias", "bias", "none") if degrees["cp"] > 1 else ("bias", "sequence", "none")
    keys: Keys = {
        "n_experts": experts,
        "top_k": rng.randint(1, min(experts, 3)),
        "n_shared_experts": rng.choice((0, 0, 1, 2)),
        "expert_dim": rng.choice([w for w in range(3, 30) if (degrees["tp"] - 1) * -(-w // degrees["tp"]) < w]),
        "n_dense_layers": rng.choice((0, 0, 1)) if layers > 1 else 0,
        "router": rng.choice(("softmax", "sigmoid")),
        "normalized": rng.random() < 0.6,
        "balance": rng.choice(balances),
        "balance_rate": rng.choice((1e-3, 0.01)),
        "qk_norm": rng.random() < 0.3,
    }
    return {f"model.{key}": value for key, value in keys.items()}


def _padding(rng: random.Random) -> Keys:
    """Documents of uneven length, one per sample, more often than of other models: only experts count tokens."""
    return {"data.packing": "pad"} if rng.random() < 0.3 else {}


def _shared(rng: random.Random, degrees: Mapping[str, int], experts: int) -> Keys:
    """The degree of ep: of dp_shard x cp, and of the experts."""
    both = math.gcd(degrees["dp_shard"] * degrees["cp"], experts)
    degree = rng.choice([n for n in range(min(2, both), both + 1) if both % n == 0])
    return {"mesh.ep": degree} if degree > 1 else {}


def _dealt(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether each of these ranks gets as many of the heads."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _data(rng: random.Random, degrees: Mapping[str, int], tensor: Keys, context: Keys) -> Keys:
    sliced = degrees["tp"] * degrees["cp"] if tensor.get("sequence_parallel", True) else 1
    step = math.lcm(sliced, _pieces(degrees["cp"], context))
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
    job.layout[f"plugins.{rng.choice(('fsdp', 'ddp', 'context', 'tensor', 'pipeline'))}.enabled"] = False


def _saving(rng: random.Random, job: _Job) -> None:
    key = rng.choice(list(savings.SPOILT))
    job.curve[key] = rng.choice(savings.SPOILT[key])


def _unknown(rng: random.Random, job: _Job) -> None:
    key = rng.choice(("mesh.tpp", "plugins.fsddp.enabled", "train.microbatch", "plugins.pipeline.sched"))
    job.layout[key] = 2


def _sliced(job: _Job) -> int:
    """The degree of cp; on few ranks as many again come for it where there is none."""
    if "mesh.cp" not in job.layout and job.ranks <= 4:
        job.layout["mesh.cp"] = 2
        job.ranks *= 2
    return int(job.layout.get("mesh.cp", 1))


def _positions(rng: random.Random, job: _Job) -> None:
    cp = _sliced(job)
    job.curve["data.seq_len"] = 2 * cp * rng.randint(1, 3) + rng.choice((cp, 1, 2 * cp - 1))


def _heads_to_deal(rng: random.Random, job: _Job) -> None:
    _sliced(job)
    job.layout["plugins.context.method"] = "ulysses"
    job.curve["model.n_heads"], job.curve["model.n_kv_heads"] = rng.choice(HEADS)


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
    "positions to split": _positions,
    "heads to deal": _heads_to_deal,
    "attention method": _set("layout", "plugins.context.method", (*METHODS, "rings")),
    "window": _set("curve", "model.sliding_window", range(25)),
    "experts": _set("curve", "model.n_experts", range(1, 10)),
    "choices": _set("curve", "model.top_k", range(1, 10)),
    "ranks that share experts": _set("layout", "mesh.ep", (-1, 2, 3, 4)),
    "balance": _set("curve", "model.balance", ("sequence", "biased")),
    "written scores": _set("curve", "model.attention", ("unfused",)),
    "two wrappers": _both_wrappers,
    "saving": _saving,
    "switched off": _without,
    "unknown key": _unknown,
}


# --- what a job has -----------------------------------------------------------------------------------------------

COUNTED = ("model.name", "model.vocab_size", "model.balance", "model.router", "data.packing", "data.path")
COUNTED += ("data.workers", "train.grad_clip", "validation.every", "plugins.context.enabled", "plugins.fsdp.zero_stage")
COUNTED += ("plugins.tensor.sequence_parallel", "plugins.tensor.loss_parallel", "plugins.compile.backend")
COUNTED += ("plugins.pipeline.schedule", "plugins.pipeline.virtual_stages", "plugins.activation_checkpoint.mode")
"""Keys whose values are counted where a job has them."""


def _features(ranks: int, keys: Mapping[str, Any]) -> frozenset[str]:
    of = keys.get
    degrees = {axis: of(f"mesh.{axis}", 1) for axis in AXES}
    split = {axis for axis, degree in degrees.items() if degree > 1}
    batch_ranks = max(1, degrees["dp_replicate"] * degrees["dp_shard"])
    shards = degrees["dp_shard"] * degrees["cp"]
    whether = {
        "hsdp": {"dp_replicate", "dp_shard"} <= split,
        "dp x tp x pp": {"tp", "pp"} <= split and batch_ranks > 1,
        "dim does not divide over shards": shards > 1 and of("model.dim") % shards,
        "6 heads, 3 kv heads": (of("model.n_heads"), of("model.n_kv_heads")) == (6, 3),
        "5 layers over 4 stages": of("model.n_layers") == 5 and degrees["pp"] == 4,
        "split_points": of("plugins.pipeline.split_points"),
        "tied head": of("model.tied"),
        "tied over stages": of("model.tied") and "pp" in split,
        "sliding window": of("model.sliding_window"),
        "head_dim": of("model.head_dim"),
        "dropout": of("model.dropout"),
        "jitter": of("model.router_jitter"),
        "padded experts": of("model.n_experts") and of("data.packing") == "pad",
        "ep > 1": of("mesh.ep"),
        **{f"ep x {axis}": of("mesh.ep") and axis in split for axis in ("cp", "tp", "pp", "dp_replicate")},
        "accumulation": "pp" not in split
        and 0 < of("train.micro_batch_size", 0) < of("train.global_batch_size") // batch_ranks,
    }
    found = {name for name, there in whether.items() if there}
    found |= {f"{ranks} ranks", *(f"{axis} > 1" for axis in split)}
    if "cp" in split:
        method = of("plugins.context.method", METHODS[0])
        beside = {
            **{axis: axis in split for axis in AXES if axis != "cp"},
            "documents": of("data.packing") == "document_mask",
            "window": of("model.sliding_window"),
            "recompute": of("plugins.activation_checkpoint.mode"),
            "compile": of("plugins.compile.backend"),
        }
        found |= {f"cp {degrees['cp']}", *(f"{method} x {what}" for what, there in beside.items() if there)}
    found |= {f"{key.rpartition('.')[2]} {_text(keys[key])}" for key in COUNTED if key in keys}
    return frozenset(found | savings.features(keys))
