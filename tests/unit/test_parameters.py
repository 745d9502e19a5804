"""What a spec says of each parameter: its kind, the dimension that tensor parallelism splits, whether it decays."""

import dataclasses
import inspect
from collections.abc import Mapping

import pytest
import torch

from titan.contracts import Model
from titan.contracts.base import cost
from titan.contracts.base import spec as spec_module
from titan.contracts.base.spec import ParameterFacts
from titan.errors import PluginError
from titan.plugins.models.gpt import Gpt, GptConfig
from titan.plugins.models.llama import Llama, LlamaConfig

SIZES = {"n_layers": 1, "dim": 16, "n_heads": 2, "vocab_size": 32, "max_seq_len": 8, "ffn_dim": 24}
SPEC = Llama(LlamaConfig(**SIZES)).spec()


def _facts(model: Model) -> Mapping[str, ParameterFacts]:
    with torch.device("meta"):
        module = model.build()
    spec = model.spec()
    return {name: spec.parameter(name, p.ndim) for name, p in module.named_parameters()}


def test_a_llama() -> None:
    whole, first, second = (ParameterFacts("matrix", dim, False) for dim in (None, 0, 1))
    norm = ParameterFacts("vector", None, False)
    assert whole not in _facts(Llama(LlamaConfig(**SIZES))).values()
    assert _facts(Llama(LlamaConfig(**SIZES))) == {
        "embed.weight": ParameterFacts("table", 0, False),
        "layers.0.attn_norm.weight": norm,
        **{f"layers.0.attn.{name}.weight": first for name in ("wq", "wk", "wv")},
        "layers.0.attn.wo.weight": second,
        "layers.0.ffn_norm.weight": norm,
        **{f"layers.0.ffn.{name}.weight": first for name in ("w1", "w3")},
        "layers.0.ffn.w2.weight": second,
        "norm.weight": norm,
        "output.weight": ParameterFacts("head", 0, False),
    }


def test_biases_lie_along_the_outputs_of_a_column_and_along_nothing_in_a_row() -> None:
    facts = _facts(Gpt(GptConfig(**SIZES)))
    assert facts["layers.0.ffn.up.bias"] == ParameterFacts("vector", 0, False)
    assert facts["layers.0.ffn.down.bias"] == ParameterFacts("vector", None, False)
    assert facts["positions.weight"] == ParameterFacts("table", None, False)


def test_features_of_a_stack_lie_along_its_last_two_dimensions() -> None:
    assert SPEC.parameter("layers.0.ffn.w1.weight", 3) == ParameterFacts("matrix", 1, False)
    assert SPEC.parameter("layers.0.ffn.w2.weight", 3) == ParameterFacts("matrix", 2, False)


@pytest.mark.parametrize("owner", ["embed.weight", "output.weight"])
def test_a_tied_tensor_is_a_table_whichever_name_owns_it(owner: str) -> None:
    both = ("embed.weight", "output.weight")
    (alias,) = set(both) - {owner}
    spec = dataclasses.replace(Gpt(GptConfig(**SIZES)).spec(), tied=((alias, owner),))
    assert {spec.parameter(name, 2) for name in both} == {ParameterFacts("table", 0, False)}


@pytest.mark.parametrize("alias", ["layers.0.ffn.w1.weight", "layers.0.ffn.w2.weight"])
def test_a_matrix_that_is_tied_to_the_head_decays_as_heads_do(alias: str) -> None:
    """Also where the head owns the tensor, and wherever tensor parallelism splits the matrix."""
    for tied in ((alias, "output.weight"), ("output.weight", alias)):
        spec = dataclasses.replace(SPEC, tied=(tied,))
        assert {spec.parameter(name, 2).kind for name in tied} == {"head"}
        assert all(spec.decays(name, 2) for name in tied)


def test_layers_that_are_tied_to_each_other_stay_matrices() -> None:
    names = ("layers.0.attn.wq.weight", "layers.1.attn.wq.weight")
    spec = dataclasses.replace(SPEC, tied=(names,))
    assert {spec.parameter(name, 2) for name in names} == {ParameterFacts("matrix", 0, False)}


@pytest.mark.parametrize(
    ("name", "ndim", "kind"),
    [
        ("embed.weight", 2, "table"),
        ("more.words.weight", 2, "table"),
        ("output.weight", 2, "head"),
        ("embedding.weight", 2, "matrix"),
        ("norm.weight", 1, "vector"),
        ("layers.0.experts", 3, "matrix"),
        ("layers.0.scale", 0, "vector"),
        ("output.bias", 1, "vector"),
    ],
)
def test_without_styles_places_tell_the_kind(name: str, ndim: int, kind: str) -> None:
    spec = dataclasses.replace(SPEC, tensor={}, embeddings=("embed", "more"))
    assert spec.parameter(name, ndim) == ParameterFacts(kind, None, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("style", "dim", "partial"), [("qk_norm", None, True), ("wide_norm", 0, False)])
def test_norms_of_each_head_are_whole_and_those_over_all_lie_along_them(
    style: str, dim: int | None, partial: bool
) -> None:
    spec = dataclasses.replace(SPEC, tensor={**SPEC.tensor, "layers.*.attn.q_norm": style})
    assert spec.parameter("layers.0.attn.q_norm.weight", 1) == ParameterFacts("vector", dim, partial)
    assert not spec.parameter("layers.0.attn_norm.weight", 1).partial


def test_matrices_and_the_head_decay_but_for_those_that_the_spec_exempts() -> None:
    assert SPEC.decays("layers.0.attn.wq.weight", 2) and SPEC.decays("output.weight", 2)
    assert not SPEC.decays("embed.weight", 2) and not SPEC.decays("norm.weight", 1)
    exempt = dataclasses.replace(SPEC, no_decay=("layers.*.attn.wq.weight",))
    assert not exempt.decays("layers.0.attn.wq.weight", 2) and exempt.decays("layers.0.attn.wk.weight", 2)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model", [(Llama, LlamaConfig), (Gpt, GptConfig)], ids=["llama", "gpt"])
def test_built_in_models_need_no_exemptions(model: tuple[type[Model], type], tied: bool) -> None:
    kind, config = model
    built = kind(config(**SIZES, tied=tied))
    spec = built.spec()
    bare = dataclasses.replace(spec, no_decay=())
    with torch.device("meta"):
        named = list(built.build().named_parameters())
    assert [bare.decays(name, p.ndim) for name, p in named] == [spec.decays(name, p.ndim) for name, p in named]


@pytest.mark.parametrize(
    ("parameters", "buffers", "said"),
    [
        (["embed.weight", "layers.0.extra"], [], "no initial value for parameter layers.0.extra; .* ModelSpec.init"),
        (["embed.weight"], ["layers.0.angles"], "no initial value for buffer layers.0.angles; .* ModelSpec.buffers"),
    ],
    ids=["parameter", "buffer"],
)
def test_everything_needs_an_initial_value(parameters: list[str], buffers: list[str], said: str) -> None:
    model = Llama(LlamaConfig(**SIZES))
    with torch.device("meta"):
        module = model.build()
    modules = [name for name, _ in module.named_modules()]
    own = [name for name, _ in module.named_parameters()]
    model.spec().check_names(modules, own)
    with pytest.raises(PluginError, match=said):
        model.spec().check_names(modules, [*own, *parameters], buffers)


def test_the_worked_spec_of_the_docstring_counts_what_its_operations_state() -> None:
    text = inspect.getdoc(spec_module).partition("::\n")[2]
    names = {**vars(cost), **vars(spec_module)}
    spec = eval("\n".join(line for line in text.splitlines() if line.startswith("    ")).strip(), names)
    totals = [sum(map(cost.parameter_count, ops)) for ops in (spec.embedding_ops, spec.layer_ops, spec.head_ops)]
    assert totals == [spec.embedding_params, spec.layer_params, spec.head_params]
    for name in ("embed.weight", "layers.1.norm.weight", "layers.1.ffn.up.weight", "norm.weight", "output.weight"):
        assert spec.init_of(name)
    assert spec.style_of("layers.1.ffn.down") == "row" and spec.layer_flops_per_token(128) == 2 * 2 * 64 * 256
