"""What `[plugins.float8]` converts, how close its products are, and what it refuses before anything starts."""

import ast
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from tests.jobs import LLAMA
from tests.sweeps import sweep_but
from titan.config import load_job
from titan.contracts import BuildContext, ModelPart, ModelSpec, Precision
from titan.errors import ConfigError
from titan.packages import install, torch_release
from titan.plugins.memory import activation_checkpoint
from titan.plugins.models.llama import Llama, LlamaConfig
from titan.plugins.precision import float8
from titan.plugins.precision.float8 import Float8, Float8Config

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MX = ("mxfp8", "mxfp8_with_gw_hp")
SIZES: dict[str, Any] = {"n_layers": 2, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 256}
LINEARS = {
    f"layers.{layer}.{kind}"
    for layer in (0, 1)
    for kind in ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "ffn.w1", "ffn.w2", "ffn.w3")
}


def context(spec: ModelSpec, *techniques: Any) -> BuildContext:
    nothing: Any = None
    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    return BuildContext(job=nothing, mesh=mesh, spec=spec, precision=Precision(), techniques=techniques)


def convert(sizes: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    """The converted model, on the meta device as it is when the technique sees it."""
    model = Llama(LlamaConfig(**(SIZES | (sizes or {}))))
    with torch.device("meta"):
        module = model.build()
    Float8(Float8Config(**options)).apply(ModelPart(module), context(model.spec()))
    return module


def converted(module: nn.Module) -> dict[str, Any]:
    """Linears in float8 or MXFP8."""
    names = ("Float8Linear", "MXFP8Linear")
    return {name: found for name, found in module.named_modules() if type(found).__name__ in names}


@pytest.fixture(autouse=True)
def _torchao(request: pytest.FixtureRequest) -> None:
    if find_spec("torchao") is None and "without_torchao" not in request.node.name:
        pytest.skip("torchao is not installed")


def _refuse(*args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError("no such product here")


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelname in ("DEBUG", "WARNING") for record in caplog.records)
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_the_linears_of_layers_are_converted_and_nothing_is_renamed() -> None:
    model = Llama(LlamaConfig(**SIZES))
    with torch.device("meta"):
        before = [(name, p.shape, p.dtype, p.device) for name, p in model.build().named_parameters()]
    module = convert()
    assert converted(module).keys() == LINEARS
    assert [(name, p.shape, p.dtype, p.device) for name, p in module.named_parameters()] == before


def test_what_the_filter_names_and_what_is_uneven_stays() -> None:
    kept = convert(filter=("layers.*.attn.wo", "layers.1.ffn.*"))
    assert converted(kept).keys() == {n for n in LINEARS if not n.endswith("wo") and not n.startswith("layers.1.ffn")}
    assert converted(convert({"ffn_dim": 120})).keys() == {name for name in LINEARS if "attn" in name}


def test_weights_are_cast_before_the_gather_only_where_asked_for() -> None:
    for gather in (False, True):
        kinds = {type(linear.weight.data).__name__ for linear in converted(convert(fsdp_all_gather=gather)).values()}
        assert kinds == ({"WeightWithDynamicFloat8CastTensor"} if gather else {"Tensor"})
    # A loss that makes the gradients itself computes with parameters of its own: the head is gathered as it is.
    head = converted(convert(head=True, fsdp_all_gather=True))["output"]
    assert type(head.weight.data) is Tensor and head.config.pad_inner_dim


def test_products_are_emulated_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def emulated(**options: Any) -> set[bool]:
        return {linear.config.emulate for linear in converted(convert(**options)).values()}

    assert emulated(emulate="always") == {True}
    assert emulated(emulate="auto") == {not _has_products("tensorwise")}
    monkeypatch.setattr(torch, "_scaled_mm", _refuse)
    assert emulated(emulate="auto") == {True}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_recomputed_in_a_compiled_block_rounds_as_before(recipe: str) -> None:
    import torch._inductor.config as inductor

    with inductor.patch(emulate_precision_casts=False):
        for techniques, expected in (((), False), ((SimpleNamespace(phase="compile"),), recipe != "tensorwise")):
            module, spec = nn.Module(), Llama(LlamaConfig(**SIZES)).spec()
            Float8(Float8Config(recipe=recipe)).apply(ModelPart(module), context(spec, *techniques))
            assert inductor.emulate_precision_casts is expected


@pytest.mark.parametrize("recipe", [*RECIPES, *MX])
def test_the_head_is_converted_on_request(recipe: Any) -> None:
    assert "output" not in converted(convert(recipe=recipe, emulate="always"))
    found = converted(convert({"vocab_size": 320}, recipe=recipe, head=True, emulate="always"))
    assert found.keys() == {*LINEARS, "output"}


@pytest.mark.parametrize("recipe", [*RECIPES, *MX])
def test_a_head_projects_any_number_of_tokens(recipe: Any) -> None:
    """With the products of this CPU where it has them: their sizes are checked there."""
    module = nn.Module()
    with torch.device("meta"):
        module.output = nn.Linear(64, 96, bias=False)
    emulate = recipe in MX or not _has_products(recipe)
    spec: Any = SimpleNamespace(head=("norm", "output"), layers="layers", tied=(), layer_names=tuple)
    options: Any = {"recipe": recipe, "head": True, "emulate": "always" if emulate else "auto"}
    Float8(Float8Config(**options)).apply(ModelPart(module), context(spec))
    module.output.to_empty(device="cpu").bfloat16()
    nn.init.normal_(module.output.weight)
    x = torch.randn(1, 21, 64, dtype=torch.bfloat16)
    module.output(x).sum().backward()
    expected = x.sum((0, 1)).float().expand(96, 64)
    assert error(module.output.weight.grad.float(), expected) < 0.1


def test_a_device_without_products_is_told_or_refused(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", _refuse)
    convert(emulate="auto")
    assert said_in(caplog) == [
        "float8 makes this run slower: products are emulated in float32, as they need a GPU of CUDA capability 8.9 or "
        "higher and this device is a cpu; remove [plugins.float8] for speed"
    ]
    with pytest.raises(ConfigError) as refused:
        convert(emulate="never")
    assert str(refused.value) == (
        "[plugins.float8] recipe = 'tensorwise' needs matrix products of a GPU of CUDA capability 8.9 or higher, but "
        'this device is a cpu; use another device or recipe, or set emulate = "always" to rehearse it'
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cpu_has_products_of_tensors_and_rows(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    """What docs/design.md says of PyTorch 2.13."""
    convert(recipe=recipe, emulate="never")
    convert(recipe=recipe, emulate="auto")
    assert said_in(caplog) == []


@pytest.mark.parametrize("emulate", ["auto", "never"])
def test_mxfp8_is_refused_on_a_device_without_it(emulate: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs .* 10\.0 or higher, in bf16, but this device is a cpu; use another"):
        convert(recipe="mxfp8", emulate=emulate)
    convert(recipe="mxfp8", emulate="always")


def test_a_gpu_of_less_capability_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    said = float8._lacks(replace(context(Llama(LlamaConfig(**SIZES)).spec()), mesh=gpu), Float8Config(recipe="mxfp8"))
    assert said == "a NVIDIA H100 of capability 9.0"


class Count(TorchDispatchMode):
    """Counts operations on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("Float8" in kind.__name__ for kind in types):
            return NotImplemented
        self.found[operation] += 1
        return operation(*args, **(kwargs or {}))


def recomputing(recipe: Any, saving: bool) -> tuple[Any, set[Any]]:
    """A forward of two float8 linears under selective recomputation, and the maxima that are saved or not."""
    emulate = not _has_products(recipe)
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False)).bfloat16()
    config = Float8Config(recipe=recipe)
    float8._convert(layers, {"0", "2"}, config, emulate)
    costly = set() if config.mx else float8.MAXIMA
    policy = partial(activation_checkpoint._selective, activation_checkpoint._SAVED | (costly if saving else set()))
    return activation_checkpoint._recomputed(layers.forward, policy), costly


def inputs() -> Tensor:
    return torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)


@pytest.mark.parametrize("recipe", RECIPES)
def test_selective_recomputation_repeats_no_product_and_no_maximum(recipe: str) -> None:
    """Two linears have four products in a backward; each needs maxima of its own, which no forward has."""
    maxima = {}
    for saving in (False, True):
        forward, costly = recomputing(recipe, saving)
        y = forward(inputs())
        with Count() as backward:
            y.backward(torch.ones_like(y))
        assert sum(backward.found[operation] for operation in PRODUCTS) == 4
        maxima[saving] = sum(backward.found[operation] for operation in costly)
    assert maxima[False] - maxima[True] == 4, "x and W of two linears"


@pytest.mark.parametrize("recipe", sweep_but(RECIPES, "rowwise"))
def test_nor_does_it_where_it_is_compiled(recipe: str) -> None:
    found = {}
    for saving in (False, True):
        forward, costly = recomputing(recipe, saving)
        graphs: list[Counter[Any]] = []

        def count(graph: Any, _: Any, graphs: list[Counter[Any]] = graphs) -> Any:
            graphs.append(Counter(node.target for node in graph.graph.nodes))
            return make_boxed_func(graph)

        backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
        y = torch.compile(forward, backend=backend)(inputs())
        y.backward(torch.ones_like(y))
        backward = graphs[1]
        assert sum(backward[operation] for operation in PRODUCTS) == 4
        found[saving] = sum(backward[operation] for operation in costly)
    # One scale serves both directions; a row's does not, so a backward needs no maximum of the forward. From PyTorch
    # 2.14 on a compiler takes two equal values for one only if the backward needs both. It needs no result of a block's
    # last product, and so takes the maximum of that weight again.
    last = torch_release() < (2, 14)
    assert found[False] - found[True] == (1 + last if recipe == "tensorwise" else 0), found


def _has_products(recipe: Any) -> bool:
    spec = Llama(LlamaConfig(**SIZES)).spec()
    return not float8._lacks(context(spec), Float8Config(recipe=recipe))


def products(recipe: str, dtype: torch.dtype, emulate: bool, device: str = "cpu") -> list[Tensor]:
    """y, dL/dx and dL/dW of one linear in float8."""
    torchao = float8._torchao()
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    weight, x, gradient = (tensor.to(device, dtype) for tensor in operands())
    linear = nn.Linear(64, 96, bias=False)
    linear.weight = nn.Parameter(weight)
    linear = torchao.convert_to_float8_training(linear, config=replace(config, emulate=emulate))
    y = linear(x.requires_grad_())
    y.backward(gradient)
    assert x.grad is not None and linear.weight.grad is not None
    return [y.detach().float(), x.grad.float(), linear.weight.grad.float()]


def operands() -> list[Tensor]:
    """The weight, x and the gradient of y of a linear, with an outlier in one row of x."""
    generator = torch.Generator().manual_seed(3)
    weight, x, gradient = (torch.randn(*size, generator=generator) for size in ((96, 64), (32, 64), (32, 96)))
    x[0] *= 1e5
    return [weight, x, gradient]


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_numbers_with_three_digits(recipe: str) -> None:
    """e4m3 rounds by 1 in 16 at most, e5m2 by 1 in 8; sums of many errors are smaller, and none is no float8."""
    weight, x, gradient = operands()
    got, expected = products(recipe, torch.float32, emulate=True), [x @ weight.T, gradient @ weight, gradient.T @ x]
    errors = [error(g, e) for g, e in zip(got, expected, strict=True)]
    high = recipe == "rowwise_with_gw_hp"
    assert all(1e-3 < one < 0.08 for one in (errors[:2] if high else errors)), errors
    assert not high or errors[2] < 1e-6
    # An outlier in one row of x spoils the other rows of y with a scale for the tensor, and not with one for each row.
    spoilt = error(got[0][1:], expected[0][1:])
    assert spoilt > 0.1 if recipe == "tensorwise" else spoilt < 0.05, spoilt


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_the_device_are_the_emulated_ones(recipe: str, device: str) -> None:
    if device == "cpu" and not _has_products(recipe):
        pytest.skip("no such products on the CPU of this PyTorch")
    real = products(recipe, torch.bfloat16, emulate=False, device=device)
    for got, expected in zip(real, products(recipe, torch.bfloat16, emulate=True), strict=True):
        assert error(got.cpu(), expected) < 1e-2


def in_blocks(tensor: Tensor) -> Tensor:
    """The numbers that MXFP8 has for a matrix: in rows, 32 share the least power of 2 with which none exceeds 448."""
    blocks = tensor.double().unflatten(-1, (-1, 32))
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


@pytest.mark.parametrize("recipe", MX)
def test_products_in_blocks_are_those_of_plain_arithmetic(recipe: Any) -> None:
    """Each operand in blocks along the sum of its product: rows of x and W, columns of W and g, tokens of g and x."""
    weight, x, g = operands()
    layer = nn.Sequential(nn.Linear(64, 96, bias=False))
    layer[0].weight = nn.Parameter(weight)
    float8._convert(layer, {"0"}, Float8Config(recipe=recipe), emulate=True)
    given = x.clone().requires_grad_()
    y = layer(given)
    y.backward(g)
    expected = [in_blocks(x) @ in_blocks(weight).T, in_blocks(g) @ in_blocks(weight.T).T]
    expected += [g.T.double() @ x.double() if recipe == "mxfp8_with_gw_hp" else in_blocks(g.T) @ in_blocks(x.T).T]
    for got, plain in zip((y, given.grad, layer[0].weight.grad), expected, strict=True):
        assert error(got.detach().double(), plain) < 1e-6


BASE = [word for key, value in SIZES.items() for word in (f"--model.{key}", str(value)) if key != "vocab_size"]


def sentences(*words: str, ranks: int = 1) -> list[str]:
    try:
        load_job(LLAMA, [*BASE, "--data.path", "x", "--plugins.float8.enabled", "true", *words], ranks)
    except ConfigError as refused:
        return [fault.what.removeprefix("[plugins.float8]: ") for fault in refused.faults]
    return []


def test_what_works_is_not_refused() -> None:
    assert sentences("--plugins.float8.filter", "layers.*.attn.wo,layers.0.ffn.w1") == []
    odd = ("--data.seq_len", "15", "--train.micro_batch_size", "1")
    assert sentences("--plugins.float8.recipe", "rowwise_with_gw_hp", *odd) == []


def test_without_torchao_the_file_loads_and_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert sentences() == [f"torchao is missing: {install('float8')}"]
    with open(float8.__file__, encoding="utf-8") as file:
        names = {name for node in ast.walk(ast.parse(file.read())) for name in _imported(node)}
    assert "titan" in names and "torchao" not in names


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [str(node.module).partition(".")[0]] if isinstance(node, ast.ImportFrom) else []


def test_a_float8_gather_needs_one_scale_and_something_to_gather() -> None:
    asked = ("--plugins.float8.fsdp_all_gather", "true")
    needs = "fsdp_all_gather needs [plugins.fsdp]; add that table"
    assert sentences(*asked) == [needs]
    assert sentences(*asked, "--mesh.dp_replicate", "2", ranks=2) == [needs]
    many = "fsdp_all_gather needs recipe = \"tensorwise\": with 'rowwise' a shard has many scales"
    assert sentences(*asked, "--plugins.float8.recipe", "rowwise", "--mesh.dp_shard", "2", ranks=2) == [many]
    sharded = (*asked, "--mesh.dp_shard", "2", "--plugins.fsdp.zero_stage", "3")
    assert sentences(*sharded, "--plugins.offload.parameters", "true", ranks=2) == [
        "fsdp_all_gather scales shards on the device; set it to false, or: [plugins.offload] parameters = true keeps "
        "weights on the host; set it to false"
    ]
    assert sentences(*sharded, "--plugins.offload.optimizer", "true", ranks=2) == []


def test_sizes_must_come_out_even_and_the_nearest_degree_is_named() -> None:
    words = ("--mesh.tp", "4", "--model.n_kv_heads", "4", "--model.ffn_dim", "96")
    assert sentences(*words, ranks=4) == [
        f"layers.*.ffn.{name}: 96 {side} features over mesh.tp = 4 must be a multiple of 16 per rank; nearest that "
        "fits: 3 or 6, or name it in filter"
        for name, side in (("w1", "output"), ("w2", "input"), ("w3", "output"))
    ]
    assert sentences(*words, "--plugins.float8.filter", "layers.*.ffn.*", ranks=4) == []
    (sentence,) = sentences("--data.seq_len", "12", "--train.micro_batch_size", "2")
    assert sentence.startswith("a micro batch of 2 x 12 tokens is 24 per rank, no multiple of 16")


def test_a_filter_must_name_something_and_leave_something() -> None:
    assert sentences("--plugins.float8.filter", "layers.*.attn.wx") == [
        "filter names 'layers.*.attn.wx', which matches no linear module of a layer (did you mean 'layers.*.attn.wv'?)"
    ]
    nothing = "no linear is left to convert: each is in filter or has a size that is no multiple of 16"
    assert sentences("--plugins.float8.filter", "layers.*.attn.*,layers.*.ffn.*") == [nothing]


HEAD = ("--plugins.float8.head", "true")


def test_a_head_must_be_of_its_own_plain_and_even() -> None:
    assert sentences(*HEAD, "--model.vocab_size", "320", "--mesh.tp", "2", ranks=2) == []
    tied = "head = true needs a head of its own, but output.weight is embed.weight; untie them, or set head = false"
    assert sentences(*HEAD, "--model.vocab_size", "320", "--model.tied", "true") == [tied]
    assert sentences(*HEAD) == [
        "head = true: output has 64 x 257 features, which must be multiples of 16; nearest [model] vocab_size that "
        "fits: 256 or 272, or set head = false"
    ]
    assert sentences(*HEAD, "--model.vocab_size", "272", "--mesh.tp", "2", ranks=2) == [
        "output: 272 output features over mesh.tp = 2 must be a multiple of 16 per rank; nearest that fits: 1 or 17, "
        "or set head = false"
    ]
    capped = nn.Linear(64, 320)
    capped.__class__ = type("CappedLinear", (nn.Linear,), {})
    spec = Llama(LlamaConfig(**(SIZES | {"vocab_size": 320}))).spec()
    told = "head = true needs output to be an nn.Linear, but it is a CappedLinear; set head = false"
    assert Float8(Float8Config(head=True))._wrong_head(capped, spec) == told


def test_blocks_of_32_must_come_out_even() -> None:
    mx = ("--plugins.float8.recipe", "mxfp8", "--plugins.float8.emulate", "always")
    assert sentences(*mx) == []
    (sentence,) = sentences(*mx, "--data.seq_len", "12", "--train.micro_batch_size", "4")
    assert sentence.startswith("a micro batch of 4 x 12 tokens is 48 per rank, no multiple of 32")
    assert sentence.endswith('recipe = "mxfp8_with_gw_hp"')
    refused = sentences(*mx, "--mesh.tp", "4", "--model.n_kv_heads", "4", ranks=4)
    assert refused[0].startswith("layers.*.attn.wq: 64 output features over mesh.tp = 4 must be a multiple of 32")
    many = "fsdp_all_gather needs recipe = \"tensorwise\": with 'mxfp8' a shard has many scales"
    assert sentences(*mx, "--plugins.float8.fsdp_all_gather", "true", "--mesh.dp_shard", "2", ranks=2) == [many]
