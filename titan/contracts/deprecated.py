"""Names that plugins written for titan 0.1 use, until titan 1.0; each is reported once, with the new name.

Nothing else knows former names. To end them, delete this file and the lines that import it.
"""

import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from titan.contracts import sections
from titan.contracts.base import cost, layout, parts, spec
from titan.contracts.job import Job
from titan.contracts.model import Model
from titan.contracts.plugin import registry
from titan.contracts.technique import BuildContext, Technique
from titan.terminal import warn_once

T = TypeVar("T")

MODULES = {
    "titan.batch": "titan.contracts.base.batch",
    "titan.cache": "titan.inference.cache",
    "titan.contracts.base.attention": "titan.layers.attention",
    "titan.contracts.base.plan": "titan.contracts.base.spec",
    "titan.cost": "titan.contracts.base.cost",
    "titan.data.bytepairs": "titan.data.tokens.bytepairs",
    "titan.data.exchange": "titan.data.tokens.exchange",
    "titan.data.files": "titan.data.tokens.files",
    "titan.data.shards": "titan.data.tokens.shards",
    "titan.mesh": "titan.contracts.base.layout",
    "titan.options": "titan.contracts.plugin.options",
    "titan.parts": "titan.contracts.base.parts",
    "titan.plan": "titan.contracts.base.spec",
    "titan.registry": "titan.contracts.plugin.registry",
}
CLASSES = {
    "titan.contracts": {"ModelPlan": "ModelSpec", "World": "BuildContext", "Part": "ModelPart"},
    "titan.contracts.base.spec": {"ModelPlan": "ModelSpec"},
    "titan.contracts.base.parts": {"Part": "ModelPart"},
    "titan.contracts.base.cost": {
        "Kept": "SavedTensor", "Held": "PersistentState", "Units": "GatherPolicy", "Traffic": "CollectiveCost",
        "Lookup": "EmbeddingOp",
    },
    "titan.errors": {"Fault": "ConfigIssue"},
}  # fmt: skip
HOOKS: Mapping[type[registry.Plugin], Mapping[str, str]] = {
    Model: {"plan": "spec"},
    Technique: {
        "plan": "spec", "parity": "preserves_numerics", "optional": "search_toggle", "choices": "search_space",
    },
}  # fmt: skip
PARAMETERS = {"plan": "spec", "world": "context"}
"""Former names of the parameters of a technique's hooks."""
REGIONS = {"whole": "seq_full", "inner": "tp_sharded"}
ROLES: Mapping[str, tuple[str, str]] = {
    "batch": ("dealt", "copies"), "sequence": ("sliced", "copies"), "model": ("same", "slices"),
    "stage": ("same", "layers"), "expert": ("dealt", "slices"),
}  # fmt: skip
"""What the ranks along an axis of a former role see and hold."""
VALUES = {"region": REGIONS, "where": {"stem": "embeddings"}, "per": {"use": "micro_batch"}}
"""Keyword -> former value -> value."""

_reported: set[str] = set()


def _report(old: str, new: str) -> None:
    """Warn of a former name, once, at the plugin's line that used it first."""
    if old in _reported:
        return
    _reported.add(old)
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") in (__name__, "dataclasses", "abc") or "importlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    warn_once(f"{place}: {old} is now {new}; titan 1.0 drops the former name")


# --- modules and classes ------------------------------------------------------------------------------------------


class _FormerModules(MetaPathFinder, Loader):
    """Imports a module of titan under its former name."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        _report(f"module {name}", MODULES[name])
        sys.modules[name] = importlib.import_module(MODULES[name])


def _getattr_of(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _report(name, names[name])
        return getattr(sys.modules[module], names[name])

    return found


# --- keywords, attributes and values of data classes --------------------------------------------------------------


def formerly(**names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: attributes and keywords of `__init__` may have their former names, former=present.

    In `dataclasses.replace` a former keyword wins over the present one, which holds the value that is replaced.
    """

    def renamed(cls: Any) -> Any:
        if issubclass(cls, tuple):
            cls.__new__ = staticmethod(_accepting(cls.__new__, cls.__name__, names))
        else:
            cls.__init__ = _accepting(cls.__init__, cls.__name__, names)
        for old, new in names.items():
            setattr(cls, old, _Former(cls, old, new))
        return cls

    return renamed


class _Former:
    """A class attribute that stands for one of another name."""

    def __init__(self, cls: type[Any], old: str, new: str) -> None:
        self.place, self.old, self.new = cls.__name__, old, new

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        _report(f"{self.place}.{self.old}", self.new)
        return getattr(owner if instance is None else instance, self.new)


def _accepting(function: Callable[..., Any], name: str, names: Mapping[str, str]) -> Callable[..., Any]:
    """A function that takes former keywords and former values of its keywords too."""

    @functools.wraps(function)
    def accepting(*args: Any, **given: Any) -> Any:
        for old in [name for name in given if name in names]:
            _report(f"{name}({old}=)", f"{names[old]}=")
            given[names[old]] = given.pop(old)
        for keyword, values in VALUES.items():
            if isinstance(given.get(keyword), str):
                given[keyword] = _present(given[keyword], values)
        return function(*args, **given)

    return accepting


def _without_role(init: Callable[..., None]) -> Any:
    """`Axis.__init__`, which says what to write in place of `role`."""

    @functools.wraps(init)
    def refusing(self: layout.Axis, **given: Any) -> None:
        if "role" in given:
            data, weights = ROLES.get(str(given["role"]), ("...", "..."))
            what = f'role = {given["role"]!r}: an axis states facts now; write data="{data}", weights="{weights}"'
            raise ValueError(f"mesh axis {given.get('name')!r}: {what}")
        init(self, **given)

    return refusing


def _present(value: str, values: Mapping[str, str]) -> str:
    if value in values:
        _report(repr(value), repr(values[value]))
    return values.get(value, value)


def _of_region(method: Callable[[cost.Costs, cost.Region], float]) -> Any:
    """A method of `Costs` that takes former names of regions too."""

    @functools.wraps(method)
    def accepting(self: cost.Costs, region: str) -> float:
        return method(self, _present(region, REGIONS))  # type: ignore[arg-type]

    return accepting


class _Splits(dict[str, int]):
    """`Costs.splits`, which may be asked for a region by its former or its present name."""

    def __missing__(self, region: str) -> int:
        for old, new in REGIONS.items():
            if region in (old, new):
                return self[_present(region, REGIONS) if new in self else old]
        raise KeyError(region)


def _with_splits(init: Callable[..., None]) -> Any:
    """`Costs.__init__`, which takes a mapping with former names of regions."""

    @functools.wraps(init)
    def accepting(self: cost.Costs, **given: Any) -> None:
        splits = given.get("splits", dict.fromkeys(cost.REGIONS, 1))
        if not isinstance(splits, _Splits) or splits.keys() & REGIONS.keys():
            splits = _Splits({_present(region, REGIONS): ranks for region, ranks in splits.items()})
        init(self, **{**given, "splits": splits})

    return accepting


# --- hooks --------------------------------------------------------------------------------------------------------


class _FormerHook(_Former):
    """A hook or attribute of a contract that stands for one of another name."""

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        _report(f"{self.place}.{self.old}", self.new)
        # Where classes define the former name, this is reached by `super()` from the last of them.
        above = [i for i, base in enumerate(owner.__mro__) if vars(base).get(self.old, self) is not self]
        rest = owner.__mro__[max(above, default=-1) + 1 :]
        found = next(vars(base)[self.new] for base in rest if self.new in vars(base))
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _present_hooks(plugin: type[registry.Plugin]) -> None:
    """Give a plugin's hooks and attributes, as its classes define them, their present names."""
    found = False
    for contract in (contract for contract in HOOKS if issubclass(plugin, contract)):
        own = plugin.__mro__[: plugin.__mro__.index(contract)]
        for old, new in HOOKS[contract].items():
            nearest: Mapping[str, Any] = next(
                (vars(base) for base in own if old in vars(base) or new in vars(base)), {}
            )
            if old in nearest and new not in nearest:
                _report(f"{contract.__name__}.{old}", new)
                setattr(plugin, new, nearest[old])
                found = True
            elif new in vars(plugin) and any(old in vars(base) for base in own):
                setattr(plugin, old, vars(plugin)[new])  # for the `super()` of classes below with the former name
    if issubclass(plugin, Model) and "build" in vars(plugin):
        plugin.build = _with_positions(plugin.build)  # type: ignore[method-assign]
    if issubclass(plugin, Technique):
        if "after_step" in vars(plugin):
            plugin.after_step = _with_updated(plugin.after_step)  # type: ignore[method-assign]
        hooks = {name: hook for name, hook in vars(plugin).items() if inspect.isfunction(hook)}
        found |= any([_present_parameters(hook, name) for name, hook in hooks.items() if name[0] != "_"])
        if found and "cost" in hooks and any(_words_of(hook.__code__) & REGIONS.keys() for hook in hooks.values()):
            plugin.cost = _with_former_regions(plugin.cost)  # type: ignore[method-assign]


def _with_updated(hook: Any) -> Any:
    """A technique's `after_step`, which may take the step alone."""
    if not inspect.isfunction(hook) or list(inspect.signature(hook).parameters) != ["self", "step"]:
        return hook
    _report("Technique.after_step(step)", "after_step(step, updated)")

    @functools.wraps(hook)
    def after_step(self: Technique, step: int, updated: Tensor | None = None) -> None:
        hook(self, step)

    present: Any = after_step
    present.__signature__ = inspect.signature(Technique.after_step)
    return present


def _with_positions(build: Callable[[Model], nn.Module]) -> Any:
    """A model's `build`, whose module may have a forward that takes no positions."""

    @functools.wraps(build)
    def accepting(self: Model) -> nn.Module:
        module = build(self)
        own: Any = type(module)
        if list(inspect.signature(own.forward).parameters)[2:3] == ["documents"]:
            former = f"forward(x, documents) of {own.__name__} in {inspect.getsourcefile(own)}"
            _report(former, "forward(x, positions, documents)")

            def forward(self: Any, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Any:
                return own.forward(self, x, documents)

            module.__class__ = type(own.__name__, (own,), {"forward": forward})
        return module

    return accepting


def _present_parameters(hook: Any, name: str) -> bool:
    """Have a hook tell its parameters' present names, as hooks are called by position; whether any is a former one."""
    signature = inspect.signature(hook)
    former = [name for name in signature.parameters if name in PARAMETERS]
    for old in former:
        _report(f"parameter {old} of Technique.{name}()", PARAMETERS[old])
    if former:
        renamed = [p.replace(name=PARAMETERS.get(p.name, p.name)) for p in signature.parameters.values()]
        hook.__signature__ = signature.replace(parameters=renamed)
    return bool(former)


def _words_of(code: CodeType) -> set[str]:
    """The strings in a function, those in its sets, tuples and comprehensions included."""
    constants = [c for one in code.co_consts for c in (one if isinstance(one, tuple | frozenset) else (one,))]
    words = {constant for constant in constants if isinstance(constant, str)}
    return words.union(*(_words_of(constant) for constant in constants if isinstance(constant, CodeType)))


def _with_former_regions(cost_of: Callable[[Technique, cost.Costs, Job], cost.Costs]) -> Any:
    """A former technique's `cost`, which compares the keys of `costs.splits` with former names of regions."""
    former = {new: old for old, new in REGIONS.items()}

    @functools.wraps(cost_of)
    def accepting(self: Technique, costs: cost.Costs, job: Job) -> cost.Costs:
        given = copy.copy(costs)
        splits = _Splits({former.get(region, region): ranks for region, ranks in costs.splits.items()})
        object.__setattr__(given, "splits", splits)
        found = cost_of(self, given, job)
        return replace(found) if isinstance(found, cost.Costs) else found

    return accepting


def _init_subclass(cls: type[registry.Plugin], /, **keywords: Any) -> None:
    super(registry.Plugin, cls).__init_subclass__(**keywords)
    _present_hooks(cls)


def _install() -> None:
    sys.meta_path.append(_FormerModules())
    for module, classes in CLASSES.items():
        vars(sys.modules[module])["__getattr__"] = _getattr_of(module, classes)
    for contract, names in HOOKS.items():
        for old, new in names.items():
            setattr(contract, old, _FormerHook(contract, old, new))
    plugin: Any = registry.Plugin
    plugin.__init_subclass__ = classmethod(_init_subclass)
    formerly(sample="sample_prompt")(sections.RunSection)
    formerly(keep="keep_latest", new_data="reset_data")(sections.CheckpointSection)
    formerly(depth="topology_order")(layout.Axis)
    layout.Axis.__init__ = _without_role(layout.Axis.__init__)  # type: ignore[method-assign]
    formerly(plan="spec")(BuildContext)
    formerly(param="param_dtype", reduce="reduce_dtype")(parts.Precision)
    formerly(stem="embeddings", stem_params="embedding_params", stem_ops="embedding_ops")(spec.ModelSpec)
    formerly(numbers="numel", bytes="itemsize")(cost.SavedTensor)
    for operation in (cost.Matmul, cost.Attention, cost.Elementwise, cost.EmbeddingOp):
        formerly(keeps="saved")(operation)
    formerly(bytes="bytes_per_param", units="gathered_units")(cost.PersistentState)
    formerly(gathered="gather_every", summed="reduce_every")(cost.GatherPolicy)
    formerly(
        numbers="numel", bytes="itemsize", over="sharded_over", kept="skip_last_unit", every="per"
    )(cost.CollectiveCost)  # fmt: skip
    formerly(keeps="saved", whole="full_layer")(cost.Recompute)
    formerly(stem="embeddings")(cost.Stage)
    formerly(
        stem="embeddings", bytes="itemsize", reduce_bytes="reduce_itemsize", held="state", units="gather",
        traffic="collectives",
    )(cost.Costs)  # fmt: skip
    functions: Any = cost
    functions.linear = _accepting(cost.linear, cost.linear.__name__, {"keeps": "saved"})
    methods: Any = cost.Costs
    methods.__init__, methods.share, methods.cut = (
        _with_splits(methods.__init__), _of_region(methods.share), _of_region(methods.cut),
    )  # fmt: skip


_install()
