"""The plugin API: the contract of every kind of plugin, and all that a plugin needs to import.

A plugin subclasses one of these, sets `name` and `Config`, and carries `@register`::

    from titan.contracts import Optimizer, option, register

Public methods are hooks: their names and parameters must be those of the contract. Start the names of helpers with an
underscore. Per kind: `model`, `technique`, `objective` (loss, optimizer, schedule), `text` (tokenizer, dataset),
`tracker` (metrics). In `base`: `spec` (a model as data), `cost` (a step as data), `mesh`, `parts`, `batch`. In
`plugin`: `options`, `registry`. Models also import the library `titan.layers`.
"""

from titan.contracts.base.batch import IGNORE, Batch, Document
from titan.contracts.base.cost import Costs
from titan.contracts.base.layout import Axis, AxisFact
from titan.contracts.base.mesh import Mesh
from titan.contracts.base.parts import ModelPart, Precision, sum_gradients
from titan.contracts.base.spec import HfTensor, ModelSpec
from titan.contracts.host import host_like, locals_of, on_host, with_inner
from titan.contracts.job import Fact, Job
from titan.contracts.model import Model
from titan.contracts.objective import (
    Loss,
    LrSchedule,
    NamedParameter,
    Optimizer,
    Projection,
    groups_of,
    only,
    update_some,
)
from titan.contracts.optimizers import with_switches
from titan.contracts.plugin.options import REQUIRED, option
from titan.contracts.plugin.registry import register
from titan.contracts.technique import Alike, BuildContext, Engine, Own, PerRank, Phase, Technique
from titan.contracts.text import Dataset, Delimiters, Tokenizer
from titan.contracts.tracker import Measure, Row, RunInfo, Tracker
from titan.machine import kind_of

__all__ = [
    "IGNORE",
    "REQUIRED",
    "Alike",
    "Axis",
    "AxisFact",
    "Batch",
    "BuildContext",
    "Costs",
    "Dataset",
    "Delimiters",
    "Document",
    "Engine",
    "Fact",
    "HfTensor",
    "Job",
    "Loss",
    "LrSchedule",
    "Measure",
    "Mesh",
    "Model",
    "ModelPart",
    "ModelSpec",
    "NamedParameter",
    "Optimizer",
    "Own",
    "PerRank",
    "Phase",
    "Precision",
    "Projection",
    "Row",
    "RunInfo",
    "Technique",
    "Tokenizer",
    "Tracker",
    "groups_of",
    "host_like",
    "kind_of",
    "locals_of",
    "on_host",
    "only",
    "option",
    "register",
    "sum_gradients",
    "update_some",
    "with_inner",
    "with_switches",
]  # fmt: skip
