"""The models' numbers: sizes as published, and arithmetic held against independent computations."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_rope import naive_rope
from titan.contracts import Model, document_mask
from titan.contracts.base import options, registry
from titan.contracts.base.spec import glob_matches, nearest
from titan.errors import PluginError
from titan.plugins.models import gpt, llama
from titan.plugins.models.llama.rope import rope_table

torch.set_num_threads(1)

MODELS: list[type[Model]] = [llama.Llama, gpt.Gpt]
PRESETS = [pytest.param(m, preset, id=f"{m.name}-{preset}") for m in MODELS for preset in m.presets]


def sized(model: type[Model], preset: str, **more: object) -> Model:
    return model(model.Config(**{**model.presets[preset], **more}))


def meta(model: Model) -> nn.Module:
    with torch.device("meta"):
        return model.build()


def count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def drawn(model: Model, seed: int = 0) -> nn.Module:
    """The model on the CPU with random weights, norms and biases too, so that none of them can be left out unseen."""
    torch.manual_seed(seed)
    net = model.build()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.3)
    return net.eval()


def tokens(model: Model, batch: int = 2, length: int = 24) -> Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=g)


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "preset"), PRESETS)
def test_plan_counts_every_parameter(model: type[Model], preset: str) -> None:
    whole = sized(model, preset)
    spec, layers = whole.spec(), whole.config.n_layers
    net = meta(sized(model, preset, n_layers=2))
    assert {count(net.get_submodule(name)) for name in spec.layer_names(range(2))} == {spec.layer_params}
    embeddings = sum(count(net.get_submodule(name)) for name in spec.embeddings)
    assert embeddings == spec.embedding_params
    assert count(net) - embeddings - 2 * spec.layer_params == spec.head_params
    assert spec.params == count(net) + (layers - 2) * spec.layer_params
    layer = net.get_submodule(spec.layer_names([0])[0])
    linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    assert spec.matmul_params_per_layer == sum(m.weight.numel() for m in linears)
    assert spec.head_matmul_params == net.get_submodule("output").weight.numel()
    assert spec.head_dim * spec.n_heads == spec.dim and spec.n_heads % spec.n_kv_heads == 0
    assert list(whole.check()) == []


@pytest.mark.parametrize(("model", "preset"), PRESETS)
def test_plan_names_what_the_model_has(model: type[Model], preset: str) -> None:
    shallow = sized(model, preset, n_layers=2)
    net, spec = meta(shallow), shallow.spec()
    parameters = [name for name, _ in net.named_parameters()]
    modules = [name for name, _ in net.named_modules()]
    spec.check_names(modules, parameters)
    misspelt = dataclasses.replace(spec, tensor={**spec.tensor, "layers.*.attn": "gathr"})  # type: ignore[dict-item]
    with pytest.raises(PluginError, match=r"gives layers\.\*\.attn the style 'gathr' \(did you mean 'gather'\?\)"):
        misspelt.check_names(modules, parameters)
    for alias, owner in spec.tied:
        assert net.get_parameter(alias) is net.get_parameter(owner)
        assert alias not in parameters and owner in parameters


@pytest.mark.parametrize(
    ("preset", "params"),
    [
        ("7b", 6_738_415_616),
        ("13b", 13_015_864_320),
        ("33b", 32_528_943_616),
        ("65b", 65_285_660_672),
        ("llama3-1b", 1_235_814_400),
        ("llama3-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_llama_sizes_are_the_published_ones(preset: str, params: int) -> None:
    assert sized(llama.Llama, preset).spec().params == params


@pytest.mark.parametrize("preset", [p for p in gpt.Gpt.presets if p not in ("nano", "tiny")])
def test_gpt_sizes_are_the_published_ones(preset: str) -> None:
    model = sized(gpt.Gpt, preset)
    c, spec = model.config, model.spec()
    text = preset.removeprefix("frontier-")
    published = float(text[:-1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[text[-1]]
    assert spec.params == pytest.approx(published, rel=0.025)
    estimate = 12 * c.n_layers * c.dim**2 + (c.vocab_size + c.max_seq_len) * c.dim
    assert spec.params == pytest.approx(estimate, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_defaults_are_the_preset_nano(model: type[Model]) -> None:
    assert model.Config() == model.Config(**model.presets["nano"])


@pytest.mark.parametrize(("model", "preset"), PRESETS)
def test_presets_are_values_the_options_take(model: type[Model], preset: str) -> None:
    config, faults = options.parse(model.Config, model.presets[preset], options.Where("preset", "model"))
    assert faults == [] and config == model.Config(**model.presets[preset])


def test_models_are_registered_by_name() -> None:
    assert registry.find("model", "llama") is llama.Llama
    assert registry.find("model", "gpt") is gpt.Gpt


# --- initial values and decay -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "added"), [(llama.Llama, {"wo", "w2"}), (gpt.Gpt, {"wo", "down"})])
@pytest.mark.parametrize("tied", [True, False])
def test_initial_values(model: type[Model], added: set[str], tied: bool) -> None:
    whole = sized(model, "tiny", tied=tied, init_std=0.05)
    spec = whole.spec()
    undecayed = set()
    for name, parameter in meta(whole).named_parameters():
        how, module = spec.init_of(name), name.split(".")[-2]
        if "norm" in module and name.endswith("weight"):
            assert (how.kind, how.value) == ("constant", 1.0), name
        elif name.endswith("bias"):
            assert (how.kind, how.value) == ("constant", 0.0), name
        else:
            std = 0.05 / math.sqrt(2 * 4) if module in added else 0.05
            assert (how.kind, how.std) == ("normal", pytest.approx(std)), name
        if parameter.ndim < 2 or module in ("embed", "positions"):
            undecayed.add(name)
    names = {n for n, _ in meta(whole).named_parameters()}
    assert {n for n in names if any(glob_matches(g, n) for g in spec.no_decay)} == undecayed


# --- forward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv", [None, 4, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_forward_gives_logits(model: type[Model], kv: int | None, tied: bool) -> None:
    whole = sized(model, "tiny", n_kv_heads=kv, tied=tied)
    net, x = drawn(whole), tokens(whole)
    logits = net(x)
    assert logits.shape == (2, 24, 257) and logits.dtype == torch.float32
    logits.sum().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("packed", [True, False])
def test_later_tokens_do_not_reach_earlier_logits(model: type[Model], packed: bool) -> None:
    whole = sized(model, "tiny")
    net, x = drawn(whole), tokens(whole)
    documents = (torch.arange(24) // 16).expand(2, 24) if packed else None
    changed = x.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 257
    before, after = net(x, documents=documents), net(changed, documents=documents)
    assert torch.equal(before[:, :12], after[:, :12])
    seen = slice(12, 16) if packed else slice(12, 24)
    assert ((before[:, seen] - after[:, seen]).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("kv", [None, 2])
def test_llama_packed_documents_equal_documents_alone(kv: int | None) -> None:
    whole = sized(llama.Llama, "tiny", n_kv_heads=kv)
    net, x = drawn(whole), tokens(whole, batch=1)
    lengths = [5, 12, 7]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    alone = torch.cat([net(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(net(x, documents=documents), alone, rtol=1e-5, atol=1e-5)
    assert (net(x) - alone).abs().max() > 1e-2


@pytest.mark.parametrize("kv", [None, 2])
def test_gpt_documents_do_not_see_each_other(kv: int | None) -> None:
    whole = sized(gpt.Gpt, "tiny", n_kv_heads=kv)
    net, x = drawn(whole), tokens(whole)
    documents = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 10 + [1] * 14])
    changed = x.clone()
    changed[0, :5] = (changed[0, :5] + 1) % 257
    changed[1, 4] = (changed[1, 4] + 1) % 257
    before, after = net(x, documents=documents), net(changed, documents=documents)
    assert torch.equal(before[0, 5:], after[0, 5:]) and torch.equal(before[1, 10:], after[1, 10:])
    assert (before[0, :5] - after[0, :5]).abs().max() > 1e-3 and (before[1, 4:10] - after[1, 4:10]).abs().max() > 1e-3
    whole_sequence = torch.zeros(2, 24, dtype=torch.int64)
    torch.testing.assert_close(net(x, documents=whole_sequence), net(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_stages_in_turn_equal_the_whole(model: type[Model], tied: bool, packed: bool) -> None:
    whole = sized(model, "tiny", tied=tied)
    spec, x = whole.spec(), tokens(whole)
    documents = (torch.arange(24) // 10).expand(2, 24) if packed else None
    first, last = drawn(whole), drawn(whole)
    expected = drawn(whole)(x, documents=documents)
    for name in spec.head:
        setattr(first, name, None)
    owners = {owner.rpartition(".")[0] for _, owner in spec.tied}
    for name in set(spec.embeddings) - owners:
        setattr(last, name, None)
    for i in range(spec.n_layers):
        del (last if i < 2 else first).get_submodule(spec.layers)[str(i)]
    hidden = first(x, documents=documents)
    assert hidden.shape == (2, 24, 64)
    assert torch.equal(last(hidden, documents=documents), expected)
    assert {n for n, _ in last.named_parameters()} < {n for n, _ in drawn(whole).named_parameters()}


@pytest.mark.parametrize("model", MODELS)
def test_attention_takes_a_share_of_the_heads(model: type[Model]) -> None:
    """Shares of the heads, each on its own module, add up to the whole: what tensor parallelism counts on."""
    whole = sized(model, "tiny", n_kv_heads=4, n_layers=1)
    attn = drawn(whole).get_submodule("layers.0.attn")
    x = torch.randn(2, 24, 64)
    rest = (rope_table(whole.config, torch.arange(24)), None) if model is llama.Llama else (None,)
    total = torch.zeros(2, 24, 64) if attn.wo.bias is None else attn.wo.bias.expand(2, 24, 64)
    for share in range(2):
        part = drawn(whole).get_submodule("layers.0.attn")
        for name in ("wq", "wk", "wv"):
            own, part_own = getattr(attn, name), getattr(part, name)
            part_own.weight = nn.Parameter(own.weight.chunk(2)[share])
            part_own.bias = None if own.bias is None else nn.Parameter(own.bias.chunk(2)[share])
        part.wo.weight, part.wo.bias = nn.Parameter(attn.wo.weight.chunk(2, dim=1)[share]), None
        total = total + part(x, *rest)
    torch.testing.assert_close(total, attn(x, *rest), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_heads_equal_repeated_heads(model: type[Model], masked: bool) -> None:
    grouped, full = sized(model, "tiny", n_kv_heads=2, n_layers=1), sized(model, "tiny", n_kv_heads=8, n_layers=1)
    small, large = (drawn(m).get_submodule("layers.0.attn") for m in (grouped, full))
    with torch.no_grad():
        for name, p in large.named_parameters():
            source = small.get_parameter(name)
            if name.startswith(("wk", "wv")):
                source = source.unflatten(0, (2, 8)).repeat_interleave(4, dim=0).flatten(0, 1)
            p.copy_(source)
    x = torch.randn(2, 24, 64)
    mask = document_mask((torch.arange(24) // 10).expand(2, 24)) if masked else None
    rest = (rope_table(grouped.config, torch.arange(24)), mask) if model is llama.Llama else (mask,)
    torch.testing.assert_close(small(x, *rest), large(x, *rest), rtol=1e-5, atol=1e-5)


def test_gpt_adds_positions_once() -> None:
    whole = sized(gpt.Gpt, "tiny", n_layers=1)
    net, x = drawn(whole), tokens(whole)
    seen: list[Tensor] = []
    net.get_submodule("layers.0").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net(x)
    expected = net.get_parameter("embed.weight")[x] + net.get_parameter("positions.weight")[:24]
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=0)


def test_gpt_block_is_the_published_arithmetic() -> None:
    whole = sized(gpt.Gpt, "tiny", n_layers=1)
    block = drawn(whole).get_submodule("layers.0")
    w = dict(block.named_parameters())
    x = torch.randn(2, 24, 64)

    def norm(t: Tensor, name: str) -> Tensor:
        centred = t - t.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return centred * scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(t: Tensor, name: str) -> Tensor:
        return t @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    t = norm(x, "attn_norm")
    q, k, v = (linear(t, f"attn.{n}").unflatten(-1, (8, 8)).movedim(2, 1) for n in ("wq", "wk", "wv"))
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~torch.ones(24, 24).tril().bool(), -math.inf)
    h = x + linear((scores.softmax(-1) @ v).movedim(1, 2).flatten(2), "attn.wo")
    u = linear(norm(h, "ffn_norm"), "ffn.up")
    gelu = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    torch.testing.assert_close(block(x, None), h + linear(gelu, "ffn.down"), rtol=1e-4, atol=1e-4)


def test_llama_block_is_the_published_arithmetic() -> None:
    whole = sized(llama.Llama, "tiny", n_layers=1, n_kv_heads=8)
    block = drawn(whole).get_submodule("layers.0")
    w = {name.removesuffix(".weight"): p for name, p in block.named_parameters()}
    x = torch.randn(2, 24, 64)

    def norm(t: Tensor, name: str) -> Tensor:
        return t * (t.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w[name]

    t = norm(x, "attn_norm")
    q, k, v = ((t @ w[f"attn.{n}"].T).unflatten(-1, (8, 8)) for n in ("wq", "wk", "wv"))
    q, k, v = naive_rope(q).movedim(2, 1), naive_rope(k).movedim(2, 1), v.movedim(2, 1)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~torch.ones(24, 24).tril().bool(), -math.inf)
    h = x + (scores.softmax(-1) @ v).movedim(1, 2).flatten(2) @ w["attn.wo"].T
    t = norm(h, "ffn_norm")
    gate = t @ w["ffn.w1"].T
    expected = h + (gate * gate.sigmoid() * (t @ w["ffn.w3"].T)) @ w["ffn.w2"].T
    rope = rope_table(whole.config, torch.arange(24))
    torch.testing.assert_close(block(x, rope, None), expected, rtol=1e-4, atol=1e-4)


# --- low precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_stays_bfloat16_and_near_float32(model: type[Model]) -> None:
    whole = sized(model, "tiny")
    net, x = drawn(whole), tokens(whole)
    with torch.no_grad():
        for name, p in net.named_parameters():
            how = whole.spec().init_of(name)
            p.normal_(how.value, how.std)
    documents = (torch.arange(24) // 10).expand(2, 24)
    exact = net(x, documents=documents)
    logits = net.bfloat16()(x, documents=documents)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).std() < 0.01 * exact.std()


# --- sizes that cannot work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "sizes", "words"),
    [
        (llama.Llama, {"dim": 100, "n_heads": 8}, ["dim 100", "n_heads 8", "n_heads 5 or 10, or dim 96 or 112"]),
        (llama.Llama, {"dim": 24, "n_heads": 8}, ["dim 24", "n_heads 6 or 12, or dim 16 or 32"]),
        (llama.Llama, {"n_heads": 4, "n_kv_heads": 3}, ["n_heads 4", "n_kv_heads 3", "nearest: 2 or 4"]),
        (llama.Llama, {"rope_scaling_low": 4.0}, ["rope_scaling_low 4", "rope_scaling_high 4"]),
        (gpt.Gpt, {"dim": 100, "n_heads": 8}, ["dim 100", "n_heads 8", "n_heads 5 or 10, or dim 96 or 104"]),
        (gpt.Gpt, {"n_heads": 4, "n_kv_heads": 8}, ["n_kv_heads 8", "nearest: 4"]),
    ],
)
def test_sizes_that_clash_are_named_with_what_fits(model: type[Model], sizes: dict[str, int], words: list[str]) -> None:
    said = list(model(model.Config(**sizes)).check())
    assert len(said) == 1
    assert [word for word in words if word not in said[0]] == []


def test_nearest_gives_both_sides_where_there_are_two() -> None:
    assert nearest(7, lambda n: n % 5 == 0) == "5 or 10"
    assert nearest(3, lambda n: n % 5 == 0) == "5"
    assert nearest(7, lambda n: n == 1) == "1"
    assert nearest(7, lambda n: False) == ""
    assert nearest(10**18, most=8) == "8"
    assert nearest(7, step=3) == "6 or 9"
    assert nearest(10**18 + 1, lambda n: n == 1) == ""
