"""A model as data: sizes, names, tensor styles, initial values, costs. Techniques read it, never the model's class.

Names of modules and parameters are canonical: those of the whole model. `layers.7.attn.wq.weight` has this name on
every rank, at every layout. Patterns are globs in which `*` stands for characters within one dotted part.

A worked spec: two layers x + down(gelu(up(norm(x)))), dim 64 and 256 hidden units, 1,000 words, no attention::

    ModelSpec(
        n_layers=2, dim=64, n_heads=64, n_kv_heads=64, head_dim=0, ffn_dim=256, vocab_size=1000, max_seq_len=128,
        embeddings=("embed",), head=("norm", "output"),      # modules before and after the ModuleDict `layers`
        tensor={
            "embed": "embedding", "layers.*.norm": "norm", "layers.*.ffn": "gather", "layers.*.ffn.up": "column",
            "layers.*.ffn.down": "row", "norm": "norm", "output": "head",
        },
        init={
            "layers.*.norm.weight": ONES, "norm.weight": ONES,
            "*.weight": normal(0.02), "layers.*.ffn.*.weight": normal(0.02),
        },
        layer_params=2 * 64 * 256 + 64, embedding_params=64_000, head_params=64_000 + 64,
        matmul_params_per_layer=2 * 64 * 256, head_matmul_params=64_000,
        embedding_ops=(EmbeddingOp(module="embed", rows=1000, width=64),),
        layer_ops=(
            norm("norm", 64), linear("ffn.up", 64, 256, saved=64),
            Elementwise(region="tp_sharded", forward=512, backward=768),
            linear("ffn.down", 256, 64, saved=256, region="tp_sharded"), residual(64),
        ),
        head_ops=(norm("norm", 64), linear("output", 64, 1000, saved=64)),
    )
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Literal, get_args

from titan.contracts.base.cost import Attention, Matmul, Operation, parameter_count
from titan.contracts.plugin.options import did_you_mean
from titan.errors import PluginError

if TYPE_CHECKING:
    import torch  # a spec is read where torch is not wanted, so it is not imported

TensorStyle = Literal[
    "column", "row", "embedding", "positions", "head", "norm", "qk_norm", "wide_norm", "gather", "mixture", "summand",
    "router",
]  # fmt: skip
"""How tensor parallelism treats a module. "Split" means over the ranks of the axis tp.

column: linear, or stack of linears [E, out, in]; the output features are split.
row: linear, or stack of linears; the input features are split, and the outputs are summed over ranks.
embedding: the table is split by vocabulary.
positions: replicated table of learned positions. Its output [B, S, D] is split on S with sequence parallelism, as the
    embedding's output is, and whole otherwise.
head: linear; the output features (the vocabulary) are split. The input is the whole hidden state.
norm: replicated weights, on the hidden state [B, S, D]; with sequence parallelism, on this rank's slice of S.
qk_norm: replicated weights, on the last dimension of this rank's heads [..., N], between column and row. The gradient
    is a partial sum, with and without sequence parallelism.
wide_norm: an `nn.RMSNorm` over the features of all heads [B, S, H N], between column and row. Features and weight are
    split, and ranks sum their squares.
gather: a module whose first argument must have all positions of the sequence (attention, feed-forward).
mixture: a gather whose result [B, S, D] is each rank's summand, and is summed over ranks (experts).
summand: within a mixture, linear or a stack of linears; the input features are split, and nothing is summed.
router: within a mixture, replicated weights that decide how summands are weighted. The gradient is a partial sum.
"""

ParameterKind = Literal["matrix", "table", "head", "vector"]
"""What a parameter is to an optimizer.

matrix: the weight of a linear inside of the model, or a stack [E, out, in] of such weights.
table: the weight of an embedding, a row per word or position; also where the head is tied to it.
head: the weight that projects hidden states to logits, a row per word.
vector: at most one dimension: weights of norms, biases, scalars.
"""


@dataclass(frozen=True)
class ParameterFacts:
    """What a spec says of one parameter.

    dim: the dimension that heads, hidden units or words lie along, which tensor parallelism splits; None: it stays
        whole on every rank.
    partial: it is whole, but each rank of tensor parallelism uses it on its own heads: gradients are partial sums.
    """

    kind: ParameterKind
    dim: int | None
    partial: bool


@dataclass(frozen=True)
class Init:
    """The initial value of a parameter or buffer.

    kind: "normal": drawn from a normal distribution of mean 0.  "constant": `value` everywhere. "computed": what
        `compute(device)` returns, of the whole tensor's shape, equal on all ranks. "stream": a 63-bit hash of the
        run's seed and the tensor's name everywhere.
    std: standard deviation.  cut: values beyond this many standard deviations are redrawn.
    per_element: each element along dimension 0 is drawn from a generator of its own, so that a rank draws only the
        elements it holds: for stacks [E, ...] of weights.
    compute: called on every rank, under no_grad, with the rank's device; no collectives.
    """

    kind: Literal["normal", "constant", "computed", "stream"]
    std: float = 0.0
    cut: float = 3.0
    per_element: bool = False
    value: float = 0.0
    compute: "Callable[[torch.device], torch.Tensor] | None" = None


def normal(std: float, *, per_element: bool = False) -> Init:
    """A normal distribution of mean 0, truncated at three standard deviations; `per_element` as in `Init`."""
    return Init("normal", std=std, per_element=per_element)


def computed(compute: "Callable[[torch.device], torch.Tensor]") -> Init:
    """A function of the device that returns the whole tensor, equal on every rank, such as rotary angles."""
    return Init("computed", compute=compute)


ONES = Init("constant", value=1.0)
ZEROS = Init("constant", value=0.0)
STREAM = Init("stream")


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint, and the parameters of ours that it consists of.

    name: as in the safetensors files. Exports of a base model leave out the first dotted part.
    ours: canonical names; several are joined along dimension 0, in this order.
    transposed: the file has the transpose of our tensor, of the joined tensor, or of the element.
    element: the file has one element along dimension 0 of our only tensor, a stack [E, ...]; None: all of it. As many
        `HfTensor`s as there are elements make the stack.
    copy: a second name that some files have for the tensor (a tied head). Never written; where read, it must be equal.
    groups: equal groups of rows, such as heads, into which each of ours is cut; the groups are interleaved. Three
        tensors [H N, D] and `groups` H are [H, 3, N, D] in the file: each head's rows of all three, then the next's.
    """

    name: str
    ours: tuple[str, ...]
    transposed: bool = False
    copy: bool = False
    element: int | None = None
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as data: sizes, names, tensor parallelism, initial values, and costs.

    n_layers: layers.  dim: features of a hidden state.  vocab_size: rows of the embedding.
    n_heads, n_kv_heads: query heads and key-value heads.  head_dim: features per head. A model without attention gives
        dim, dim and 0: tensor parallelism needs a number that its degree divides, and no FLOPs of attention count.
    ffn_dim: width of the feed-forward that tensor parallelism splits; 0 where it splits none.
    max_seq_len: longest sequence, in tokens.
    embeddings, head: module names before and after the layers. The last of the head projects hidden states to logits:
        the loss is computed where its forward ends.
    attention: globs of the modules in which positions see each other, each an `AttentionCore`; empty: a model whose
        positions mix in another way, which neither slices sequences nor caches keys and values.
    whole_sequences: what but attention needs all positions of a sequence, with the key to change: why axes that slice
        sequences are refused.
    draws: globs of the modules that draw random numbers, each a `titan.layers.philox.RandomModule`. The forward of such
        a model has an argument `seeds`.
    layers: name of the ModuleDict of layers, whose keys are global numbers. Embeddings, layers and head have every
        parameter.
    tied: (alias, owner) names of parameters that are one tensor; the owner's name is canonical.
    tensor: module glob -> `TensorStyle`, how tensor parallelism treats the module; the first glob that matches counts.
    init: parameter glob -> `Init`; the first glob that matches counts, and every parameter needs one.
    buffers: buffer glob -> `Init`, for persistent and other buffers; matched as in `init`.
    no_decay: globs of matrices and heads to exempt from weight decay, as tables and vectors always are.
    layer_params, embedding_params, head_params: parameters of the mean layer, of the embeddings, of the head. A tied
        tensor counts among the embeddings. The mean of unequal layers need not be whole; all layers together are.
    matmul_params_per_layer, head_matmul_params: parameters that each token is multiplied by: the weights of linears. Of
        a stack of weights, those that a token passes; of unequal layers, the mean.
    embedding_ops, layer_ops, head_ops: operations for the planner (`titan.contracts.base.cost` has a worked layer),
        which name modules of a layer from the layer. Without layer_ops the model trains, but `titan plan` refuses it.
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
    attention: tuple[str, ...] = ()
    whole_sequences: str = ""
    draws: tuple[str, ...] = ()
    tensor: Mapping[str, TensorStyle]
    init: Mapping[str, Init]
    buffers: Mapping[str, Init] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()
    layer_params: float
    embedding_params: int
    head_params: int
    matmul_params_per_layer: float
    head_matmul_params: int
    embedding_ops: tuple[Operation, ...] = ()
    layer_ops: tuple[Operation, ...] = ()
    head_ops: tuple[Operation, ...] = ()

    @property
    def params(self) -> int:
        """Parameters of the whole model; a tied tensor counts once."""
        return self.embedding_params + round(self.n_layers * self.layer_params) + self.head_params

    @cached_property
    def stacked_params(self) -> int:
        """Parameters of the whole model in stacks of weights, such as experts, by `layer_ops`."""
        stacks = (op for op in self.layer_ops if isinstance(op, Matmul) and op.stack > 1)
        return round(self.n_layers * sum(op.of_layers * parameter_count(op) for op in stacks))

    @cached_property
    def active_params(self) -> int:
        """Parameters of the whole model that a token passes: of a stack, the share that it uses."""
        stacks = (op for op in self.layer_ops if isinstance(op, Matmul) and op.stack > 1)
        idle = sum(op.of_layers * parameter_count(op) * (1 - op.used / op.stack) for op in stacks)
        return self.params - round(self.n_layers * idle)

    def layer_flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of one layer per token: 2 per matmul parameter, plus both products of attention.

        These count the full S x S square, as in PaLM, appendix B (arXiv 2204.02311), or what `layer_ops` state.
        """
        cores = [op.of_layers * op.flops_per_token(seq_len) for op in self.layer_ops if isinstance(op, Attention)]
        square = 4.0 * seq_len * self.n_heads * self.head_dim
        return 2.0 * self.matmul_params_per_layer + (sum(cores) if cores else square)

    def head_flops_per_token(self) -> float:
        """Forward FLOPs of the head per token."""
        return 2.0 * self.head_matmul_params

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward per token: three times forward (arXiv 2204.02311, appendix B)."""
        return 3.0 * (self.n_layers * self.layer_flops_per_token(seq_len) + self.head_flops_per_token())

    def init_of(self, name: str) -> Init:
        """The initial value of a parameter, by its canonical name; a PluginError where no glob of `init` matches."""
        if how := next((how for glob, how in self.init.items() if glob_matches(glob, name)), None):
            return how
        what = f"the model's spec has no initial value for parameter {name}"
        raise PluginError(f"{what}; add a glob that matches it to ModelSpec.init")

    def init_of_buffer(self, name: str) -> Init:
        """The initial value of a buffer, by its canonical name; a PluginError where no glob of `buffers` matches."""
        if how := next((how for glob, how in self.buffers.items() if glob_matches(glob, name)), None):
            return how
        if any(glob_matches(f"{glob}.stream", name) for glob in self.draws):
            return STREAM
        raise PluginError(
            f"the model's spec has no initial value for buffer {name}; give it one in ModelSpec.buffers: "
            "titan.contracts.base.spec.computed(function of the device), or a constant such as ZEROS"
        )

    def style_of(self, module: str) -> TensorStyle | None:
        """How tensor parallelism treats a module, by its name; None where no glob of `tensor` matches."""
        return next((style for glob, style in self.tensor.items() if glob_matches(glob, module)), None)

    def parameter(self, name: str, ndim: int) -> ParameterFacts:
        """What the spec says of a parameter, by its canonical name and its number of dimensions.

        The kind follows from the tensor style of its module, and where there is none, from `embeddings` and `head`.
        Features lie along the last two dimensions: the first of three counts the weights of a stack.
        """
        style = self.style_of(name.rpartition(".")[0])
        names = {name}.union(*(pair for pair in self.tied if name in pair))
        places = {self._place(name.rpartition(".")[0]) for name in names}
        kinds: tuple[ParameterKind, ...] = ("table", "head", "matrix")  # of a tied tensor, the first of these
        kind = "vector" if ndim < 2 else next(kind for kind in kinds if kind in places)
        outputs, inputs = max(ndim - 2, 0), ndim - 1 if ndim > 1 else None
        dims = {"column": outputs, "row": inputs, "summand": inputs, "embedding": 0, "head": 0, "wide_norm": 0}
        return ParameterFacts(kind, dims.get(style or ""), partial=style in ("qk_norm", "router"))

    def _place(self, module: str) -> Literal["matrix", "table", "head"]:
        style = self.style_of(module)
        embedding = any(f"{module}.".startswith(f"{name}.") for name in self.embeddings)
        if style in ("embedding", "positions") or (style is None and embedding):
            return "table"
        return "head" if style == "head" or (style is None and module == self.head[-1]) else "matrix"

    def decays(self, name: str, ndim: int) -> bool:
        """Whether usual practice decays a parameter: matrices and the head, but for those of `no_decay`."""
        kind = self.parameter(name, ndim).kind
        return kind in ("matrix", "head") and not any(glob_matches(glob, name) for glob in self.no_decay)

    def layer_names(self, numbers: Iterable[int] | None = None) -> tuple[str, ...]:
        """Module names of the layers with these global numbers; None: of all layers."""
        return tuple(f"{self.layers}.{i}" for i in (range(self.n_layers) if numbers is None else numbers))

    @cached_property
    def styles(self) -> dict[str, TensorStyle | None]:
        """Tensor style per module that an operation names; None where `tensor` has no glob for the module."""
        ops = (*self.embedding_ops, *self.layer_ops, *self.head_ops)
        modules = [op.module for op in ops if not isinstance(op, Attention) and op.module]
        return {module: self.style_of(module) or self.style_of(f"{self.layers}.0.{module}") for module in modules}

    def shard_units(self) -> tuple[tuple[str, ...], ...]:
        """Modules that sharded data parallelism gathers together, in forward order; those of a tied tensor last."""
        owners = {name.rpartition(".")[0] for pair in self.tied for name in pair}
        embeddings = tuple((name,) for name in self.embeddings if name not in owners)
        last = tuple(name for name in self.embeddings if name in owners) + self.head
        return embeddings + tuple((name,) for name in self.layer_names()) + (last,)

    def check_names(self, modules: Iterable[str], parameters: Iterable[str], buffers: Iterable[str] = ()) -> None:
        """Check every name and glob of the spec against the names of the whole model.

        A PluginError where a glob matches nothing, a tensor style is unknown, a module of embeddings or head is absent,
        or a parameter or buffer has no initial value.
        """
        modules, parameters, buffers = list(modules), list(parameters), list(buffers)
        for glob, style in self.tensor.items():
            if style not in (known := get_args(TensorStyle)):
                raise PluginError(f"ModelSpec.tensor gives {glob} the style {style!r}{did_you_mean(style, known)}")
        absent = [name for name in (*self.embeddings, self.layers, *self.head) if name not in modules]
        of_modules, of_parameters = (*self.tensor, *self.attention, *self.draws), (*self.init, *self.no_decay)
        for globs, names in ((of_modules, modules), (of_parameters, parameters), (self.buffers, buffers)):
            absent += [glob for glob in globs if not any(glob_matches(glob, name) for name in names)]
        if absent:
            raise PluginError(
                f"the model's spec has names and globs that match nothing in the model: {', '.join(absent)}; "
                "correct them in ModelSpec (* stands for characters within one dotted part)"
            )
        for name in parameters:
            self.init_of(name)
        for name in buffers:
            self.init_of_buffer(name)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(r"[^.]+".join(re.escape(piece) for piece in pattern.split("*")))


def glob_matches(pattern: str, name: str) -> bool:
    """Whether a dotted name matches a glob; `*` stands for one or more characters within one dotted part."""
    return _compiled(pattern).fullmatch(name) is not None


def nearest(
    number: int, fits: Callable[[int], bool] = lambda _: True, *, step: int = 1, most: int | None = None
) -> str:
    """`5 or 10`: the integers nearest to `number`, below (from 1) and above, for which `fits` holds; or empty.

    step: only multiples of this are considered.  most: the largest value allowed.
    At most 10,000 candidates are tried on either side: some milliseconds, however far off the number is.
    """
    below = range((number - 1 if most is None else min(number - 1, most)) // step * step, 0, -step)
    first = number // step * step + step
    above = range(first, first + 10_000 * step if most is None else most + 1, step)
    found = (next((n for n in islice(side, 10_000) if fits(n)), None) for side in (below, above))
    return " or ".join(str(n) for n in found if n is not None)
