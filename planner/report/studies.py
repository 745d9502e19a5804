"""Studies: a job with one parameter varied; each point is a prediction.

They give the usual figures of papers on scaling (arXiv 2104.04473; Frontier: arXiv 2312.12705) for any job and cluster.
A study starts from the job's own layout and overrides one or two of its keys; mesh axes are found by their facts.
Invalid jobs stay in the study, with the reason; so do jobs that do not fit into memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from titan.config import Job, load_job
from titan.config.tables import Table, override
from titan.contracts import Technique
from titan.contracts.base.layout import AxisFact, Layout
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import did_you_mean
from titan.errors import ConfigError
from titan.planner.machine.cluster import Cluster
from titan.planner.report import STUDIES
from titan.planner.report.study import MEASURES, Point, Study
from titan.planner.search.space import FEWEST_POSITIONS, LARGEST_MICRO_BATCH, tables_with_effect
from titan.planner.search.unset_options import settle
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB
from titan.planner.step.predict import Planner, Prediction

WIDEST = 32
"""Largest degree of the ranks that split a layer; wider groups leave nodes and only get slower."""
TIMES_LARGER = 8
"""How much larger than the job scaling goes, where nothing says how many ranks there are."""
DOUBLINGS = 5
"""How often the bubble's study doubles the micro batches, and that of context parallelism the sequence length."""
LONGEST = 2**20
"""Tokens of the longest sequence that is made by doubling."""


# --- what is varied -----------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """A point before its prediction. x, label, series: see `Point`.  keys: dotted keys of the TOML, overridden."""

    x: float
    label: str
    keys: Mapping[str, Any]
    series: str = ""


class Base(NamedTuple):
    """The job as given.

    fixed: dotted keys set on the command line.  ranks: largest number of ranks of a scaling study; 0: not given.
    """

    job: Job
    fixed: frozenset[str]
    ranks: int

    def axis(self, fact: AxisFact) -> str:
        """Name of the mesh axis that states this fact; of several, the one with the largest degree or with default -1.

        Raises:
            ConfigError: no plugin owns such an axis.
        """
        layout = self.job.layout
        axes = [axis for axis in layout.dimensions if fact in (axis.data, axis.weights)]
        if not axes:
            raise ConfigError(f'no plugin owns an axis that is "{fact}"', "--study")
        return max(axes, key=lambda axis: (layout.degrees[axis.name], axis.default == -1)).name


Varied = tuple[str, list[Variant]]
"""Label of x, and the points."""


def _weak(base: Base) -> Varied:
    """The batch grows with the ranks that share it, so that the share of each stays."""
    size, axis = base.job.train.global_batch_size, base.axis("dealt")
    share = size // base.job.layout.degrees[axis]
    return "ranks", [
        variant._replace(keys={**variant.keys, "train.global_batch_size": share * degree})
        for degree, variant in _scaled(base, axis)
    ]


def _strong(base: Base) -> Varied:
    """The batch stays, and more ranks share it."""
    return "ranks", [variant for _, variant in _scaled(base, base.axis("dealt"))]


def _scaled(base: Base, axis: str) -> Iterator[tuple[int, Variant]]:
    """Degrees of the axis that shares the batch, from 1 up in powers of two, with the job's own and the largest."""
    layout = base.job.layout
    own = layout.degrees[axis]
    largest = _left(layout, axis, base.ranks) if base.ranks else own * TIMES_LARGER
    for degree in sorted({own, largest, *(2**i for i in range(largest.bit_length()))}):
        world = layout.world_size // own * degree
        if degree <= largest:
            yield degree, Variant(world, f"{world:,}", {f"mesh.{axis}": degree})


def _tensor(base: Base) -> Varied:
    return _exchanged(base, "slices", WIDEST)


def _pipeline(base: Base) -> Varied:
    return _exchanged(base, "layers", base.job.spec.n_layers)


def _exchanged(base: Base, fact: AxisFact, most: int) -> Varied:
    """Degrees of an axis, with the axis that shares the batch taking what is left of the same ranks."""
    axis, batch, degrees = base.axis(fact), base.axis("dealt"), base.job.layout.degrees
    product = degrees[axis] * degrees[batch]
    return f"mesh.{axis}", [
        Variant(degree, str(degree), {f"mesh.{axis}": degree, f"mesh.{batch}": product // degree})
        for degree in _divisors(product, most)
    ]


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def _context(base: Base) -> Varied:
    """Degrees of the axis that splits sequences, on the same ranks, for longer and longer sequences.

    The tokens of a step stay, and those of a micro batch while it has several sequences.
    """
    job, axis = base.job, base.axis("sliced")
    (own, batch), most = (job.data.seq_len, job.train.global_batch_size), LONGEST // FEWEST_POSITIONS
    lengths = [own]
    while len(lengths) <= DOUBLINGS and 2 * lengths[-1] <= LONGEST and batch % (2 * lengths[-1] // own) == 0:
        lengths.append(2 * lengths[-1])
    variants = []
    for length in lengths:
        times = length // own
        keys = {"data.seq_len": length, "train.global_batch_size": batch // times}
        if job.table["train"]["micro_batch_size"]:
            keys |= {"train.micro_batch_size": max(1, job.micro_batch // times)}
        if length > job.spec.max_seq_len:
            keys["model.max_seq_len"] = length
        for variant in _exchanged(base, "sliced", most)[1]:
            variants.append(variant._replace(keys={**variant.keys, **keys}, series=f"{length:,} tokens"))
    return f"mesh.{axis}", variants


def _micro_batch(base: Base) -> Varied:
    share = base.job.train.global_batch_size // base.job.batch_ranks
    sizes = _divisors(share, LARGEST_MICRO_BATCH)
    return "micro batch", [Variant(size, str(size), {"train.micro_batch_size": size}) for size in sizes]


def _recompute(base: Base) -> Varied:
    """Each technique of phase `recompute` that may be left out: off, and what can be chosen for it."""
    variants: list[Variant] = []
    techniques = (plugin for plugin in registry.of_kind(Technique.kind) if issubclass(plugin, Technique))
    toggled = [plugin for plugin in techniques if plugin.search_toggle and plugin.phase == "recompute"]
    for plugin in toggled:
        prefix = f"{plugin.name} " if len(toggled) > 1 else ""
        for choice in (None, *tables_with_effect(plugin, base.job.spec)):
            said = "off" if choice is None else _said(choice)
            keys = {"enabled": choice is not None, **(choice or {})}
            variants.append(Variant(len(variants), prefix + said, _keys(plugin.name, keys)))
    return "recompute", variants


def _bubble(base: Base) -> Varied:
    """More and more micro batches, in each of the orders that the pipeline can run them."""
    job, stages = base.job, base.job.layout.degree_of("layers")
    if stages == 1:
        axis = base.axis("layers")
        raise ConfigError(f"bubble: the job has no pipeline; give it one: --mesh.{axis} 4", "--study")
    counts = sorted({job.micro_batches, *(stages * 2**i for i in range(DOUBLINGS + 1))})
    variants = []
    for series, keys in _orders(base):
        for count in counts:
            batch = count * job.micro_batch * job.batch_ranks
            sizes = {"train.micro_batch_size": job.micro_batch, "train.global_batch_size": batch}
            variants.append(Variant(count, str(count), keys | sizes, series))
    return "micro batches", variants


def _orders(base: Base) -> Iterator[tuple[str, dict[str, Any]]]:
    """What can be chosen for the technique that cuts the model: one choice for each value of its first option.

    The job's own stands for its value; where the command line fixes that option, it is the only one.
    """
    technique = next(t for t in base.job.techniques if any(axis.weights == "layers" for axis in t.axes))
    if not technique.search_space:
        yield "", {}
        return
    name, (first, *_) = technique.name, technique.search_space[0]
    table = base.job.table["plugins"][name]
    own = {key: table[key] for key in technique.search_space[0]}
    found: dict[Any, Mapping[str, Any]] = {}
    if f"plugins.{name}.{first}" not in base.fixed:
        for choice in technique.search_space:
            found.setdefault(choice[first], choice)
    found[own[first]] = own
    for choice in found.values():
        yield _said(choice), {k: v for k, v in _keys(name, choice).items() if k not in base.fixed}


def _keys(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {f"plugins.{name}.{key}": value for key, value in options.items()}


def _said(choice: Mapping[str, Any]) -> str:
    """Values of a choice in words; 0 stands for what the plugin would choose itself."""
    return " ".join(str(value) for value in choice.values() if value != 0)


# --- studies ------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A study that `run` can make; see `Study`. scales: --world-size is its largest number of ranks, not the job's."""

    title: str
    varied: Callable[[Base], Varied]
    shown: tuple[str, ...]
    bars: bool = False
    scales: bool = False


SCALING = ("efficiency", "tokens_per_s")
THROUGHPUT = ("model_tflops_per_device", "memory_gib")
STEP = ("step_time_s", "memory_gib")
KINDS: Mapping[str, Kind] = {
    "weak-scaling": Kind("Weak scaling: batch size proportional to the number of ranks", _weak, SCALING, scales=True),
    "strong-scaling": Kind("Strong scaling: fixed batch size", _strong, SCALING, scales=True),
    "bubble": Kind("Pipeline bubble by number of micro batches per step", _bubble, ("bubble_fraction",)),
    "tp": Kind("Throughput by tensor-parallel degree", _tensor, THROUGHPUT),
    "pp": Kind("Throughput by number of pipeline ranks", _pipeline, THROUGHPUT),
    "cp": Kind("Step by context-parallel degree and sequence length: fixed tokens per step", _context, STEP),
    "recompute": Kind("Memory by recomputation mode", _recompute, THROUGHPUT[::-1], bars=True),
    "micro-batch": Kind("Throughput by micro-batch size", _micro_batch, THROUGHPUT),
}


def run(name: str, config: Path | None, overrides: Sequence[str], cluster: Cluster, world_size: int | None) -> Study:
    """Predict all points of a study of a job on a cluster.

    name: one of `STUDIES`.  config: TOML; None: quickstart.  overrides: `--key=value` words.  world_size: ranks of the
    job, reached by the data-parallel degree; of a scaling study the largest number of ranks; None: the job's own.

    Raises:
        ConfigError: no such study, the job is invalid, or the study has fewer than two points to compare.
    """
    if name not in KINDS:
        raise ConfigError(f"{name}: no such study{did_you_mean(name, STUDIES)}", "--study")
    kind, planner = KINDS[name], Planner(cluster)
    base, words = _base(kind, config, overrides, world_size)
    x_label, variants = kind.varied(base)
    if len(variants) < 2:
        what = f"{name}: nothing to vary with {base.job.layout}; give it more ranks (--world-size N) or a larger batch"
        raise ConfigError(what, "--study")
    points = tuple(_point(variant, config, words, planner) for variant in variants)
    if "efficiency" in kind.shown:
        points = _with_efficiency(points)
    job = f"{config.stem if config else 'quickstart'}, {base.job.layout}, {cluster.name}"
    return Study(name, kind.title, job, x_label, kind.shown, kind.bars, cluster.device.memory_gib, points)


def _base(kind: Kind, config: Path | None, overrides: Sequence[str], world_size: int | None) -> tuple[Base, list[str]]:
    """The job as given, and the words that say so."""
    given = Table()
    override(given, overrides)
    job = load_job(config, overrides)
    fixed = frozenset(".".join(key) for key in given.origins)
    base, words = Base(job, fixed, world_size or 0), list(overrides)
    if world_size is None or kind.scales:
        return base, words
    axis = base.axis("dealt")
    words.append(f"--mesh.{axis}={_left(base.job.layout, axis, world_size)}")
    return base._replace(job=load_job(config, words)), words


def _left(layout: Layout, axis: str, world_size: int) -> int:
    """Degree of an axis with which the layout has `world_size` ranks."""
    others = layout.world_size // layout.degrees[axis]
    if world_size < 1 or world_size % others:
        near = max(others, round(world_size / others) * others)
        what = f"--world-size {world_size}: must be a multiple of the layout's other {others} ranks; nearest: {near}"
        raise ConfigError(what, "command line")
    return world_size // others


def _point(variant: Variant, config: Path | None, words: Sequence[str], planner: Planner) -> Point:
    keys = {key: str(value).lower() if isinstance(value, bool) else value for key, value in variant.keys.items()}
    try:
        loaded = load_job(config, [*words, *(f"--{key}={value}" for key, value in keys.items())])
    except ConfigError as error:
        why = "; ".join(dict.fromkeys(fault.what for fault in error.faults))
        return Point(variant.x, variant.label, variant.series, {}, False, why)
    job, _ = settle(loaded, planner.cluster.memory)
    prediction = planner.predict(costs_of(job), job.layout)
    return Point(variant.x, variant.label, variant.series, values_of(prediction), prediction.fits)


def values_of(prediction: Prediction) -> dict[str, float]:
    """The measures of a study that a prediction has."""
    fullest = max(prediction.memory, key=lambda memory: memory.total)
    own = {"activations_gib": fullest.activations / GIB, "memory_gib": fullest.total / GIB}
    return own | {name: getattr(prediction, name) for name in MEASURES if hasattr(prediction, name)}


def _with_efficiency(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Speed of a rank as a share of that of the smallest job that fits (if none does, that can work)."""
    working = [point for point in points if point.values]
    first = next((point for point in working if point.fits), working[0] if working else None)
    return tuple(
        replace(p, values={**p.values, "efficiency": _speed(p) / _speed(first)}) if first and p.values else p
        for p in points
    )


def _speed(point: Point) -> float:
    """Tokens per second of one rank."""
    return point.values["tokens_per_s"] / point.x
