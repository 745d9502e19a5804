"""The plugin API: the contract of every kind of plugin, and all that a plugin needs to import.

A plugin subclasses one of these, sets `name` and `Config`, and carries `@register`::

    from titan.contracts import Optimizer, option, register

Public methods are hooks: their names and parameters must be those of the contract. Start the names of helpers with an
underscore. Per kind: `model`, `technique`, `objective` (loss, optimizer, schedule), `text` (tokenizer, dataset),
`tracker` (metrics). In `base`: `spec` (a model as data), `cost` (a step as data), `mesh`, `parts`, `batch`. In
`plugin`: `options`, `registry`. Models also import the library `titan.layers`.
"""

from titan.contracts.base.batch import IGNORE as IGNORE
from titan.contracts.base.batch import Batch as Batch
from titan.contracts.base.batch import Document as Document
from titan.contracts.base.batch import copy_to as copy_to
from titan.contracts.base.batch import host_values as host_values
from titan.contracts.base.cost import Costs as Costs
from titan.contracts.base.layout import Axis as Axis
from titan.contracts.base.layout import AxisFact as AxisFact
from titan.contracts.base.mesh import Mesh as Mesh
from titan.contracts.base.parts import ModelPart as ModelPart
from titan.contracts.base.parts import Precision as Precision
from titan.contracts.base.parts import sum_gradients as sum_gradients
from titan.contracts.base.sharding import shard_of as shard_of
from titan.contracts.base.spec import HfTensor as HfTensor
from titan.contracts.base.spec import ModelSpec as ModelSpec
from titan.contracts.host import host_like as host_like
from titan.contracts.host import locals_of as locals_of
from titan.contracts.host import on_host as on_host
from titan.contracts.host import with_inner as with_inner
from titan.contracts.job import Fact as Fact
from titan.contracts.job import Job as Job
from titan.contracts.model import Model as Model
from titan.contracts.objective import Loss as Loss
from titan.contracts.objective import LrSchedule as LrSchedule
from titan.contracts.objective import NamedParameter as NamedParameter
from titan.contracts.objective import Optimizer as Optimizer
from titan.contracts.objective import Projection as Projection
from titan.contracts.objective import groups_of as groups_of
from titan.contracts.objective import only as only
from titan.contracts.objective import update_some as update_some
from titan.contracts.optimizers import with_switches as with_switches
from titan.contracts.plugin.options import REQUIRED as REQUIRED
from titan.contracts.plugin.options import option as option
from titan.contracts.plugin.registry import register as register
from titan.contracts.technique import Alike as Alike
from titan.contracts.technique import BuildContext as BuildContext
from titan.contracts.technique import Engine as Engine
from titan.contracts.technique import Own as Own
from titan.contracts.technique import PerRank as PerRank
from titan.contracts.technique import Phase as Phase
from titan.contracts.technique import Technique as Technique
from titan.contracts.text import Dataset as Dataset
from titan.contracts.text import Delimiters as Delimiters
from titan.contracts.text import Tokenizer as Tokenizer
from titan.contracts.tracker import Measure as Measure
from titan.contracts.tracker import Row as Row
from titan.contracts.tracker import RunInfo as RunInfo
from titan.contracts.tracker import Tracker as Tracker
from titan.machine import kind_of as kind_of
from titan.machine import runs_triton as runs_triton
