"""What a model says about itself, as pure data. Techniques read it; nobody asks the model's class.

Module and parameter names are the canonical ones of the whole model: `layers.7.attn.wq.weight` has this name on
every rank, whichever stage holds it. Patterns are globs in which `*` stands for one dotted part.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Literal

from titan.contracts.base.cost import EmbeddingOp, Matmul, Operation
from titan.errors import PluginError

if TYPE_CHECKING:
    import torch  # a spec is read where torch is not wanted, so it is not imported

TensorStyle = Literal["column", "row", "embedding", "positions", "head", "norm", "qk_norm", "gather"]
"""How tensor parallelism treats a module.

column: linear, output features split.  row: linear, input features split, outputs summed.
embedding: table split by vocabulary.
positions: replicated table of learned positions; its output [1, S, D], made from the whole range of positions, is
    split on S when sequences are split (as the embedding's is, which it is added to) and whole otherwise.
head: linear, output (vocabulary) split, fed by the whole hidden state.
norm: replicated weights, works on the hidden state [B, S, D], on the sequence shard when sequences are split.
qk_norm: replicated weights, works on the last dimension of this rank's heads [..., N], between column and row: their
    gradient is a part of the sum over ranks, whether sequences are split or not.
gather: a module whose first argument must be whole in the sequence (attention, feed-forward).
"""


@dataclass(frozen=True)
class Init:
    """The initial value of a parameter or a buffer.

    normal: drawn with this std, cut at `cut` standard deviations.  constant: `value` everywhere.
    computed: what `compute(device)` returns, of the whole tensor's shape; equal on all ranks.
    """

    kind: Literal["normal", "constant", "computed"]
    std: float = 0.0
    cut: float = 3.0
    value: float = 0.0
    compute: "Callable[[torch.device], torch.Tensor] | None" = None


def normal(std: float) -> Init:
    """Normal of mean 0 and this std, redrawn beyond three of them (a truncated normal)."""
    return Init("normal", std=std)


def computed(compute: "Callable[[torch.device], torch.Tensor]") -> Init:
    """What a function of the device returns: the whole tensor, the same on every rank (a table of rotary angles)."""
    return Init("computed", compute=compute)


ONES = Init("constant", value=1.0)
ZEROS = Init("constant", value=0.0)


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint, and the parameters of ours it is made of.

    name: as it stands in the safetensors files; base-model exports leave out its first part.  ours: canonical names;
    more than one are joined along dimension 0, in this order.  transposed: theirs is the transpose of ours (joined).
    copy: some files hold the tensor once more under this name (a tied head); never written, and must be the same.
    """

    name: str
    ours: tuple[str, ...]
    transposed: bool = False
    copy: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as data: sizes, names, where it may be cut, split, recomputed and wrapped, and what it costs.

    embeddings, layers, head: names of the modules before the layers, of the ModuleDict of layers (keyed by global layer
        number), and of the modules after them.
    tied: (alias, owner) names of parameters that are one tensor; the owner's name is the canonical one.
    tensor: module glob -> TensorStyle.
    init: parameter glob -> Init; every parameter is matched by exactly the first glob that fits it.
    buffers: buffer glob -> Init, persistent or not, matched as `init` is; what `build` computed on the meta device is
        lost. No forward writes to a persistent one: ranks see other tokens, and a checkpoint keeps one value for all.
    no_decay: globs of the parameters that usual practice exempts from weight decay.
    ffn_dim: width of the feed-forward, where tensor parallelism splits one; 0 elsewhere.
    layer_params, embedding_params, head_params: parameters of one layer, of the embeddings, of the head (a tied tensor
        counts in the embeddings).
    matmul_params_per_layer, head_matmul_params: those that multiply every token.
    embedding_ops, layer_ops, head_ops: operations of the embeddings, of a layer and of the head, for the planner;
        modules are named from the whole model in the embeddings and the head, from the layer in a layer. Empty: the
        model cannot be planned with.
    """

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int = 0
    vocab_size: int
    max_seq_len: int
    embeddings: tuple[str, ...]
    layers: str = "layers"
    head: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()
    tensor: Mapping[str, TensorStyle]
    init: Mapping[str, Init]
    buffers: Mapping[str, Init] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()
    layer_params: int
    embedding_params: int
    head_params: int
    matmul_params_per_layer: int
    head_matmul_params: int
    embedding_ops: tuple[Operation, ...] = ()
    layer_ops: tuple[Operation, ...] = ()
    head_ops: tuple[Operation, ...] = ()

    @property
    def params(self) -> int:
        """Parameters of the whole model, a tied tensor once."""
        return self.embedding_params + self.n_layers * self.layer_params + self.head_params

    def layer_flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of one layer for one token: 2 per matmul parameter plus the two products of attention.

        Attention counts the full square, 4 * seq_len * heads * head_dim, as PaLM's appendix B does (arXiv 2204.02311).
        """
        return 2.0 * self.matmul_params_per_layer + 4.0 * seq_len * self.n_heads * self.head_dim

    def head_flops_per_token(self) -> float:
        """Forward FLOPs of the head for one token."""
        return 2.0 * self.head_matmul_params

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward for one token: three times forward (arXiv 2204.02311, appendix B)."""
        return 3.0 * (self.n_layers * self.layer_flops_per_token(seq_len) + self.head_flops_per_token())

    def init_of(self, name: str) -> Init:
        """The Init of a parameter.

        Raises:
            PluginError: no glob of `init` fits the name.
        """
        for pattern, how in self.init.items():
            if glob_matches(pattern, name):
                return how
        raise PluginError(f"the model's spec has no init for parameter {name}")

    def init_of_buffer(self, name: str) -> Init:
        """The Init of a buffer.

        Raises:
            PluginError: no glob of `buffers` fits the name.
        """
        for pattern, how in self.buffers.items():
            if glob_matches(pattern, name):
                return how
        raise PluginError(
            f"the model's spec has no initial value for buffer {name}; give it one in ModelSpec.buffers: "
            "titan.contracts.base.spec.computed(function of the device), or a constant such as ZEROS"
        )

    def layer_names(self, numbers: Iterable[int] | None = None) -> tuple[str, ...]:
        """Names of the layer modules, all or those of these numbers."""
        return tuple(f"{self.layers}.{i}" for i in (range(self.n_layers) if numbers is None else numbers))

    @cached_property
    def styles(self) -> dict[str, TensorStyle | None]:
        """How each module that an operation names is split; None where nothing says."""
        first, found = f"{self.layers}.0.", {}
        for op in (*self.embedding_ops, *self.layer_ops, *self.head_ops):
            if isinstance(op, Matmul | EmbeddingOp):
                names = (op.module, first + op.module)
                fitting = (style for glob, style in self.tensor.items() if any(glob_matches(glob, n) for n in names))
                found[op.module] = next(fitting, None)
        return found

    def shard_units(self) -> tuple[tuple[str, ...], ...]:
        """Modules gathered together by sharded data parallelism, in forward order: embeddings, layers, the head.

        Modules that share a tied tensor fall in one unit, the last.
        """
        owners = {name.rpartition(".")[0] for pair in self.tied for name in pair}
        embeddings = tuple((name,) for name in self.embeddings if name not in owners)
        last = tuple(name for name in self.embeddings if name in owners) + self.head
        return embeddings + tuple((name,) for name in self.layer_names()) + (last,)

    def check_names(self, modules: Iterable[str], parameters: Iterable[str], buffers: Iterable[str] = ()) -> None:
        """Hold every name and glob of the spec against the whole model.

        Raises:
            PluginError: a glob matches nothing, a module of embeddings or head is absent, a parameter or buffer has no
                init.
        """
        modules, parameters, buffers = list(modules), list(parameters), list(buffers)
        absent = [name for name in (*self.embeddings, self.layers, *self.head) if name not in modules]
        absent += [g for g in self.tensor if not any(glob_matches(g, m) for m in modules)]
        absent += [g for g in (*self.init, *self.no_decay) if not any(glob_matches(g, p) for p in parameters)]
        absent += [g for g in self.buffers if not any(glob_matches(g, b) for b in buffers)]
        if absent:
            raise PluginError(f"the model's spec names what the model does not have: {', '.join(absent)}")
        for name in parameters:
            self.init_of(name)
        for name in buffers:
            self.init_of_buffer(name)


REACH = 10_000
"""Numbers that `nearest` asks about on either side: some milliseconds, however far off the number is."""


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(r"[^.]+".join(re.escape(piece) for piece in pattern.split("*")))


def glob_matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a glob; `*` stands for one or more characters within one dotted part."""
    return _compiled(pattern).fullmatch(name) is not None


def nearest(
    number: int, fits: Callable[[int], bool] = lambda _: True, *, step: int = 1, most: int | None = None
) -> str:
    """`5 or 10`: the integers next to `number`, below (from 1 on) and above, that fit; empty when none is near.

    Only multiples of `step` are asked about, none above `most`, and at most `REACH` of them on either side.
    """
    below = range((number - 1 if most is None else min(number - 1, most)) // step * step, 0, -step)
    first = number // step * step + step
    above = range(first, first + REACH * step if most is None else most + 1, step)
    found = (next((n for n in islice(side, REACH) if fits(n)), None) for side in (below, above))
    return " or ".join(str(n) for n in found if n is not None)
