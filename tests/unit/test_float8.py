"""What `[plugins.float8]` converts, how close its products are, and what it refuses before anything starts."""

import ast
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.jobs import LLAMA
from titan.config import load_job
from titan.contracts import BuildContext, ModelPart, ModelSpec, Precision
from titan.errors import ConfigError, install
from titan.plugins.models.llama import Llama, LlamaConfig
from titan.plugins.precision import float8
from titan.plugins.precision.float8 import Float8, Float8Config

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
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
    return {name: found for name, found in module.named_modules() if type(found).__name__ == "Float8Linear"}


# --- what is converted --------------------------------------------------------------------------------------------


@needs_torchao
def test_the_linears_of_layers_are_converted_and_nothing_is_renamed() -> None:
    model = Llama(LlamaConfig(**SIZES))
    with torch.device("meta"):
        before = [(name, p.shape, p.dtype, p.device) for name, p in model.build().named_parameters()]
    module = convert()
    assert converted(module).keys() == LINEARS
    assert [(name, p.shape, p.dtype, p.device) for name, p in module.named_parameters()] == before


@needs_torchao
def test_what_the_filter_names_and_what_is_uneven_stays() -> None:
    kept = convert(filter=("layers.*.attn.wo", "layers.1.ffn.*"))
    assert converted(kept).keys() == {n for n in LINEARS if not n.endswith("wo") and not n.startswith("layers.1.ffn")}
    assert converted(convert({"ffn_dim": 120})).keys() == {name for name in LINEARS if "attn" in name}


@needs_torchao
def test_weights_are_cast_before_the_gather_only_where_asked_for() -> None:
    for gather in (False, True):
        kinds = {type(linear.weight.data).__name__ for linear in converted(convert(fsdp_all_gather=gather)).values()}
        assert kinds == ({"WeightWithDynamicFloat8CastTensor"} if gather else {"Tensor"})


@needs_torchao
def test_products_are_emulated_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("no such product here")

    def emulated(**options: Any) -> set[bool]:
        return {linear.config.emulate for linear in converted(convert(**options)).values()}

    assert emulated(emulate="always") == {True}
    assert emulated(emulate="auto") == {not _has_products("tensorwise")}
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert emulated(emulate="auto") == {True}


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_recomputed_in_a_compiled_block_rounds_as_before(recipe: str) -> None:
    import torch._inductor.config as inductor

    with inductor.patch(emulate_precision_casts=False):
        for techniques, expected in (((), False), ((SimpleNamespace(phase="compile"),), recipe != "tensorwise")):
            module, spec = nn.Module(), Llama(LlamaConfig(**SIZES)).spec()
            Float8(Float8Config(recipe=recipe)).apply(ModelPart(module), context(spec, *techniques))
            assert inductor.emulate_precision_casts is expected


# --- the products -------------------------------------------------------------------------------------------------


def _has_products(recipe: str) -> bool:
    spec = Llama(LlamaConfig(**SIZES)).spec()
    config = float8._torchao().Float8LinearConfig.from_recipe_name(recipe)
    return float8._multiplies(context(spec), config)


def products(recipe: str, dtype: torch.dtype, emulate: bool, device: str = "cpu") -> list[Tensor]:
    """y, dL/dx and dL/dW of one linear in float8, and an outlier in one row of x."""
    torchao = float8._torchao()
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    generator = torch.Generator().manual_seed(3)
    weight, x, gradient = (torch.randn(*size, generator=generator) for size in ((48, 64), (32, 64), (32, 48)))
    x[0] *= 1e5
    linear = nn.Linear(64, 48, bias=False)
    linear.weight = nn.Parameter(weight.to(device, dtype))
    linear = torchao.convert_to_float8_training(linear, config=replace(config, emulate=emulate))
    x = x.to(device, dtype).requires_grad_()
    y = linear(x)
    y.backward(gradient.to(device, dtype))
    assert x.grad is not None and linear.weight.grad is not None
    return [y.detach().float(), x.grad.float(), linear.weight.grad.float()]


def exact() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight, x, gradient = (torch.randn(*size, generator=generator) for size in ((48, 64), (32, 64), (32, 48)))
    x[0] *= 1e5
    return [x @ weight.T, gradient @ weight, gradient.T @ x]


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_numbers_with_three_digits(recipe: str) -> None:
    """e4m3 rounds by 1 in 16 at most, e5m2 by 1 in 8; sums of many errors are smaller, and none is no float8."""
    got, expected = products(recipe, torch.float32, emulate=True), exact()
    errors = [error(g, e) for g, e in zip(got, expected, strict=True)]
    high = recipe == "rowwise_with_gw_hp"
    assert all(1e-3 < one < 0.08 for one in (errors[:2] if high else errors)), errors
    assert not high or errors[2] < 1e-6
    # An outlier in one row of x spoils the other rows of y with a scale for the tensor, and not with one for each row.
    spoilt = error(got[0][1:], expected[0][1:])
    assert spoilt > 0.1 if recipe == "tensorwise" else spoilt < 0.05, spoilt


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_the_device_are_the_emulated_ones(recipe: str, device: str) -> None:
    if device == "cpu" and not _has_products(recipe):
        pytest.skip("no such products on the CPU of this PyTorch")
    real = products(recipe, torch.bfloat16, emulate=False, device=device)
    for got, expected in zip(real, products(recipe, torch.bfloat16, emulate=True), strict=True):
        assert error(got.cpu(), expected) < 1e-2


# --- what is refused ----------------------------------------------------------------------------------------------

BASE = [word for key, value in SIZES.items() for word in (f"--model.{key}", str(value)) if key != "vocab_size"]


def sentences(*words: str, ranks: int = 1) -> list[str]:
    try:
        load_job(LLAMA, [*BASE, "--data.path", "x", "--plugins.float8.enabled", "true", *words], ranks)
    except ConfigError as refused:
        return [fault.what.removeprefix("[plugins.float8]: ") for fault in refused.faults]
    return []


@needs_torchao
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, []), (2, ["--mesh.tp", "2"]), (2, ["--mesh.dp_shard", "2", "--plugins.float8.fsdp_all_gather", "true"]),
        (1, ["--plugins.float8.filter", "layers.*.attn.wo,layers.0.ffn.w1"]),
        (1, ["--plugins.float8.recipe", "rowwise", "--plugins.activation_checkpoint.mode", "selective"]),
        (1, ["--plugins.float8.recipe", "rowwise_with_gw_hp", "--data.seq_len", "15", "--train.micro_batch_size", "1"]),
    ],
)  # fmt: skip
def test_what_works_is_not_refused(ranks: int, words: list[str]) -> None:
    assert sentences(*words, ranks=ranks) == []


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


@needs_torchao
def test_a_float8_gather_needs_one_scale_and_something_to_gather() -> None:
    asked = ("--plugins.float8.fsdp_all_gather", "true")
    needs = "fsdp_all_gather needs [plugins.fsdp]; add that table"
    assert sentences(*asked) == [needs]
    assert sentences(*asked, "--mesh.dp_replicate", "2", ranks=2) == [needs]
    assert sentences(*asked, "--plugins.float8.recipe", "rowwise", "--mesh.dp_shard", "2", ranks=2) == [
        "fsdp_all_gather needs recipe = \"tensorwise\": with 'rowwise' a shard has many scales"
    ]


@needs_torchao
def test_slices_must_come_out_even_and_the_nearest_degree_is_named() -> None:
    words = ("--mesh.tp", "4", "--model.n_kv_heads", "4", "--model.ffn_dim", "96")
    assert sentences(*words, ranks=4) == [
        f"layers.*.ffn.{name}: 96 {side} features over mesh.tp = 4 must be a multiple of 16 per rank; nearest that "
        "fits: 3 or 6, or name it in filter"
        for name, side in (("w1", "output"), ("w2", "input"), ("w3", "output"))
    ]
    assert sentences(*words, "--plugins.float8.filter", "layers.*.ffn.*", ranks=4) == []


@needs_torchao
def test_tokens_of_a_micro_batch_must_come_out_even_for_gradients_in_float8() -> None:
    (sentence,) = sentences("--data.seq_len", "12", "--train.micro_batch_size", "2")
    assert sentence.startswith("a micro batch of 2 x 12 tokens is 24 per rank, no multiple of 16")


@needs_torchao
def test_a_filter_must_name_something_and_leave_something() -> None:
    assert sentences("--plugins.float8.filter", "layers.*.attn.wx") == [
        "filter names 'layers.*.attn.wx', which matches no linear module of a layer (did you mean 'layers.*.attn.wv'?)"
    ]
    nothing = "no linear is left to convert: each is in filter or has a size that is no multiple of 16"
    assert sentences("--plugins.float8.filter", "layers.*.attn.*,layers.*.ffn.*") == [nothing]
