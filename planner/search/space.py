"""The search space of a job on a number of ranks: degrees of mesh axes, micro batch sizes, options of techniques.

Plugins define it: each axis belongs to a plugin, and each technique declares the options that a search tries, and
whether a search may switch it off. Keys fixed by the user stay fixed. A technique that changes the loss curve
(`preserves_numerics = False`) is not searched unless the job or the command line asks for it. An axis whose ranks have
weights of their own keeps the job's degree: the curve follows from it.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from titan.config import Job, load_job
from titan.config.tables import QUICKSTART, Table, override, plugin_folders, read
from titan.config.techniques import agree, chosen_techniques, unattended
from titan.contracts import ModelSpec, Technique
from titan.contracts.base.layout import Axis, Layout, unfoldable
from titan.contracts.plugin import registry
from titan.contracts.plugin.conformance import made, sentences
from titan.contracts.plugin.options import coerce, did_you_mean, options_of
from titan.errors import ConfigError

Options = tuple[tuple[str, Any], ...]
Chosen = tuple[tuple[str, Options | None], ...]
LARGEST_MICRO_BATCH = 16
"""Sequences; larger ones fill no device better, and are seldom possible."""
FEWEST_POSITIONS = 4096
"""Positions of a sequence per rank; with fewer, communication of keys and values outlasts attention between nodes."""


@dataclass(frozen=True)
class Choice:
    """One layout. options: (technique, its (option, value) pairs) of each searched technique; None: switched off."""

    layout: Layout
    micro_batch: int
    options: Chosen = ()

    def values(self) -> dict[str, Any]:
        """The layout as dotted keys of a job's TOML and their values."""
        found: dict[str, Any] = {f"mesh.{axis}": degree for axis, degree in self.layout.degrees.items()}
        found["train.micro_batch_size"] = self.micro_batch
        for name, options in self.options:
            found[f"plugins.{name}.enabled"] = options is not None
            found |= {f"plugins.{name}.{key}": value for key, value in options or ()}
        return found

    def words(self) -> list[str]:
        """The layout as overrides for the command line, `--key=value` each."""
        return [
            f"--{key}={str(value).lower()}" if value is True or value is False else f"--{key}={value}"
            for key, value in self.values().items()
        ]

    def __str__(self) -> str:
        chosen = [
            f"{name} {' '.join(str(value) for _, value in options)}".strip()
            for name, options in self.options
            if options is not None
        ]
        return ", ".join([str(self.layout), f"micro batch {self.micro_batch}", *chosen])


class Space:
    """All layouts of a job on `ranks` ranks.

    job: loaded for one rank of a worker.
    fixed: dotted keys that keep the job's value (mesh axes: the value in `degrees`).
    widest: largest tensor-parallel degree, usually the ranks per node; 0: no limit.
    left_out: techniques that are not searched because they change the loss curve: name -> words that include it.
    """

    def __init__(
        self,
        job: Job,
        ranks: int,
        fixed: Collection[str] = (),
        degrees: Mapping[str, int] | None = None,
        widest: int = 0,
    ) -> None:
        self.job, self.ranks, self.fixed, self.widest = job, ranks, frozenset(fixed), widest
        self.degrees = degrees or {}
        self._known = [p for p in registry.of_kind(Technique.kind) if issubclass(p, Technique)]
        self._stated = {t.name: t for t in job.techniques}
        self._instances: dict[tuple[str, Options], Technique] = {}
        self._chosen: dict[Any, list[type[Technique]] | None] = {}
        self._searched: dict[str, list[Options]] = {}
        self._accepted: dict[tuple[str, int], bool] = {}
        self.left_out = {
            p.name: self._asking(p)
            for p in self._known
            if self._is_choice(p) and not (p.preserves_numerics or self._asked(p))
        }

    @staticmethod
    def _is_choice(plugin: type[Technique]) -> bool:
        return bool(plugin.search_toggle or plugin.axes)

    @staticmethod
    def _asking(plugin: type[Technique]) -> str:
        """Words of a command line that include a technique."""
        own = next((axis.name for axis in plugin.axes if axis.weights == "own"), "")
        return f"--mesh.{own} N" if own else f"--plugins.{plugin.name}.enabled true"

    def _asked(self, plugin: type[Technique]) -> bool:
        """Whether the job has it on, or the command line speaks of it or of its axes."""
        axes = {f"mesh.{axis.name}" for axis in plugin.axes}
        said = any(key in axes or key.startswith(f"plugins.{plugin.name}.") for key in self.fixed)
        return said or plugin.name in self._stated

    def layouts(self) -> Iterator[Layout]:
        """Every factorization of the number of ranks over the mesh axes, with every degree of axes that fold others."""
        axes, dimensions = self.job.layout.axes, self.job.layout.dimensions
        for degrees in self._shared_out(dimensions, self.ranks):
            world = {axis.name: degree for axis, degree in zip(dimensions, degrees, strict=True)}
            flat = Layout(axes, {axis.name: world.get(axis.name, 1) for axis in axes})
            folding = [self._folding(axis, flat) if axis.folds else [world[axis.name]] for axis in axes]
            for chosen in itertools.product(*folding):
                layout = Layout(axes, dict(zip(flat.degrees, chosen, strict=True)))
                if not any(unfoldable(layout)):
                    yield layout

    def _shared_out(self, axes: Sequence[Axis], ranks: int) -> Iterator[tuple[int, ...]]:
        if not axes:
            if ranks == 1:
                yield ()
            return
        for degree in self._degrees(axes[0], ranks):
            for rest in self._shared_out(axes[1:], ranks // degree):
                yield (degree, *rest)

    def _folding(self, axis: Axis, layout: Layout) -> list[int]:
        """Degrees of an axis that folds others: divisors of the ranks of these, which its technique accepts."""
        ranks = layout.remainder(axis.name)  # the axis has degree 1 in `layout`
        if self.degrees.get(axis.name) == -1:
            return [ranks]
        degrees = self._degrees(axis, ranks)
        return degrees if f"mesh.{axis.name}" in self.fixed else [n for n in degrees if self._accepts(axis, n)]

    def _accepts(self, axis: Axis, degree: int) -> bool:
        """Whether the technique of a folding axis accepts a degree on as many ranks: for dense models it may not."""
        if degree == 1:
            return True
        if (axis.name, degree) not in self._accepted:
            axes, widest = self.job.layout.axes, self.job.layout.folded(axis.name)[0]
            layout = Layout(axes, {one.name: degree if one.name in (axis.name, widest) else 1 for one in axes})
            owners = [self._instance(plugin, ()) for plugin in self._known if axis in plugin.axes]
            others = (t for t in self.job.techniques if t.name not in {owner.name for owner in owners})
            job = self.job.laid_out(layout, self.job.micro_batch, (*others, *owners))
            said = [sentence for owner in owners for sentence in sentences(owner, "check", job, job.spec)]
            self._accepted[axis.name, degree] = not said
        return self._accepted[axis.name, degree]

    def _degrees(self, axis: Axis, ranks: int) -> list[int]:
        if f"mesh.{axis.name}" in self.fixed and self.degrees.get(axis.name, 1) != -1:
            degree = self.degrees.get(axis.name, 1)
            return [degree] if ranks % degree == 0 else []
        owners = [plugin.name for plugin in self._known if axis in plugin.axes]
        if all(owner in self.left_out for owner in owners):
            return [1]
        most = min(ranks, self.widest or ranks) if (axis.weights, axis.folds) == ("slices", ()) else ranks
        if axis.data == "sliced":
            most = min(most, max(1, self.job.data.seq_len // FEWEST_POSITIONS))
        if axis.weights == "layers":
            most = min(most, self.job.spec.n_layers)
        return [degree for degree in range(1, most + 1) if ranks % degree == 0]

    def micro_batches(self, layout: Layout) -> list[int]:
        """Micro batch sizes (sequences) that divide a rank's share of the global batch; none if that is no integer.

        Sizes with a factor g in common with the ranks that split a sequence are left out: g times as many data-parallel
        ranks with 1/g of either have the same tokens, micro batches and shards per rank, and communicate less.
        """
        size, ranks = self.job.train.global_batch_size, layout.degree_of("dealt")
        if size % ranks:
            return []
        if "train.micro_batch_size" in self.fixed and self.job.train.micro_batch_size:
            fits = size // ranks % self.job.train.micro_batch_size == 0
            return [self.job.train.micro_batch_size] if fits else []
        sizes = [b for b in range(1, min(size // ranks, LARGEST_MICRO_BATCH) + 1) if size // ranks % b == 0]
        if any(f"mesh.{axis}" in self.fixed for axis in layout.axes_of("dealt", "sliced")):
            return sizes
        return [b for b in sizes if math.gcd(b, layout.degree_of("sliced")) == 1]

    def options(self, layout: Layout) -> Iterator[tuple[Chosen, Sequence[Chosen]]]:
        """Combinations of options at a layout, for all techniques that are on or may be switched on.

        Yields (options of techniques that do not cut the model into stages, all combinations for those that do).
        """
        on = chosen_techniques(self._known, self._switches, layout)
        plain: list[list[tuple[str, Options | None]]] = []
        staged: list[list[tuple[str, Options | None]]] = []
        free = (p for p in self._known if p.search_toggle and p not in on and p.name not in self.left_out)
        for plugin in [*on, *free]:
            chosen = self._choices(plugin, layout)
            if chosen:
                (staged if any(axis.weights == "layers" for axis in plugin.axes) else plain).append(chosen)
        stages = list(itertools.product(*staged))
        for combination in itertools.product(*plain):
            yield combination, stages

    def _choices(self, plugin: type[Technique], layout: Layout) -> list[tuple[str, Options | None]]:
        """What can be chosen for a technique; nothing where it has nothing to do."""
        idle = plugin.axes and all(layout.degree(axis.name) == 1 for axis in plugin.axes)
        switched = f"plugins.{plugin.name}.enabled" in self.fixed
        off = switched and not self._switches[plugin.name]
        combinations: list[Options | None] = [] if idle or off else [*self._combinations(plugin)]
        if plugin.search_toggle and not switched:
            combinations = [None, *(combinations or [()])]
        return [(plugin.name, combination) for combination in combinations]

    @cached_property
    def _switches(self) -> dict[str, bool]:
        """Techniques that the job itself switches on and off."""
        tables = self.job.table["plugins"].items()
        return dict.fromkeys(self._stated, True) | {
            name: False for name, table in tables if name != "path" and not table["enabled"]
        }

    def _combinations(self, plugin: type[Technique]) -> list[Options]:
        """(option, value) pairs that a technique's search goes through, without what is fixed."""
        if plugin.name not in self._searched:
            own = self.job.table["plugins"].get(plugin.name, {})
            fixed = {key: value for key, value in own.items() if f"plugins.{plugin.name}.{key}" in self.fixed}
            free = [
                tuple((key, value) for key, value in choice.items() if key not in fixed)
                for choice in tables_with_effect(plugin, self.job.spec)
                if all(fixed.get(key, value) == value for key, value in choice.items())
            ]
            self._searched[plugin.name] = [options for options in dict.fromkeys(free) if options]
        return self._searched[plugin.name]

    def job_of(self, choice: Choice) -> Job | None:
        """The job with this layout; None if techniques are missing or conflict."""
        options = dict(choice.options)
        on = self._on(choice.layout, tuple((name, values is not None) for name, values in choice.options))
        if on is None:
            return None
        techniques = tuple(self._instance(plugin, options.get(plugin.name) or ()) for plugin in on)
        return self.job.laid_out(choice.layout, choice.micro_batch, techniques)

    def _on(self, layout: Layout, switched: tuple[tuple[str, bool], ...]) -> list[type[Technique]] | None:
        """The techniques that are on; None where they do not get along, or an axis has nobody to care for it."""
        key = (tuple(degree > 1 for degree in layout.degrees.values()), switched)
        if key not in self._chosen:
            on = chosen_techniques(self._known, self._switches | dict(switched), layout)
            astray = unattended(self._known, on, layout) or agree([self._instance(plugin, ()) for plugin in on])
            self._chosen[key] = None if astray else on
        return self._chosen[key]

    @staticmethod
    def refusal(job: Job) -> str:
        """What a technique's `check` says against the job, the first sentence; empty: the job is valid."""
        plan = job.spec
        return next((sentence for t in job.techniques for sentence in sentences(t, "check", job, plan)), "")

    @classmethod
    def allows(cls, job: Job) -> bool:
        """Whether every technique's `check` accepts the job."""
        return not cls.refusal(job)

    def _instance(self, plugin: type[Technique], options: Options) -> Technique:
        key = (plugin.name, options)
        if key not in self._instances:
            config = self._stated[plugin.name].config if plugin.name in self._stated else plugin.Config()
            fields = {o.key: o.field for o in options_of(plugin.Config)}
            config = replace(config, **{fields[name]: value for name, value in options})
            self._instances[key] = made(plugin, config)
        return self._instances[key]


def tables_with_effect(plugin: type[Technique], spec: ModelSpec) -> list[Mapping[str, Any]]:
    """The tables of a technique's `search_space` that change something for this model."""
    fields = {o.key: o.field for o in options_of(plugin.Config)}
    made_with = ((table, {fields[key]: value for key, value in table.items()}) for table in plugin.search_space)
    return [
        table
        for table, options in made_with
        if not sentences(made(plugin, plugin.Config(**options)), "no_effect", spec)
    ]


@dataclass(frozen=True)
class Base:
    """A job loaded for one rank of a worker, the dotted keys that stay fixed, and the degrees of its mesh axes.

    fixed: those of the command line, and axes with weights of their own: the curve follows from the job's degree.
    overrides: the command line's `--key=value` words, in the present spelling.
    """

    job: Job
    fixed: frozenset[str]
    degrees: Mapping[str, int]
    overrides: tuple[str, ...] = ()

    def space(self, ranks: int, widest: int) -> Space:
        """The search space on `ranks` ranks; widest: largest tensor-parallel degree, 0: no limit."""
        return Space(self.job, ranks, self.fixed, self.degrees, widest)


def load_base(path: Path | None, overrides: Sequence[str]) -> Base:
    """Load a job without its layout; layout keys in `overrides` are fixed in the search.

    An axis with weights of their own keeps the job's degree.

    path: TOML; None: quickstart.  overrides: `--key=value` words.

    Raises:
        ConfigError: the job is invalid; lists all errors.
    """
    given = Table()
    override(given, overrides)
    keys = [key for key in given.origins if not isinstance(given.at(*key), dict)]
    words = [f"--{'.'.join(key)}={given.at(*key)}" for key in keys if key[0] != "mesh"]
    registry.load_plugins(plugin_folders(read(path or QUICKSTART, overrides)))
    axes = [axis for p in registry.of_kind(Technique.kind) if issubclass(p, Technique) for axis in p.axes]
    kept = [axis.name for axis in axes if axis.weights == "own"]
    words += [f"--{'.'.join(key)}={given.at(*key)}" for key in keys if key[0] == "mesh" and key[1] in kept]
    alone = [f"--mesh.{axis.name}=1" for axis in axes if axis.name not in kept]
    sizes = [word for word in words if word.startswith("--train.micro_batch_size=")] or ["--train.micro_batch_size=1"]
    job = load_job(path, [*words, *alone, *sizes])
    degrees = {axis: _degree(axis, value, job.layout) for axis, value in given.at("mesh").items()}
    own = [axis.name for technique in job.techniques for axis in technique.axes if axis.weights == "own"]
    degrees = {axis: job.layout.degree(axis) for axis in own} | degrees
    fixed = frozenset(".".join(key) for key in keys) | {f"mesh.{axis}" for axis in own}
    return Base(job, fixed, degrees, tuple(f"--{'.'.join(key)}={given.at(*key)}" for key in keys))


def _degree(axis: str, value: Any, layout: Layout) -> int:
    where = f"--mesh.{axis} {value}"
    if axis not in layout.degrees:
        raise ConfigError(f"{where}: no plugin owns it{did_you_mean(axis, layout.degrees)}", "command line")
    try:
        return int(coerce(value, int))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", "command line") from None
