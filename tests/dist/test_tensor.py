"""Tensor parallelism gives one process's loss and gradients, whatever it splits (plugins/parallel/tensor)."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.logits import logits_of
from tests.sweeps import sweep_but, swept_case
from titan.contracts import BuildContext, Mesh, Model, ModelPart, Precision
from titan.contracts.base.layout import Layout
from titan.plugins.losses.cross_entropy import Config as LossConfig
from titan.plugins.losses.cross_entropy import CrossEntropy
from titan.plugins.models.bloom import Bloom, BloomConfig
from titan.plugins.models.gemma import Gemma, GemmaConfig
from titan.plugins.models.gpt import Gpt, GptConfig
from titan.plugins.models.llama import Llama, LlamaConfig
from titan.plugins.models.neox import Neox, NeoxConfig
from titan.plugins.models.olmo2 import Olmo2, Olmo2Config
from titan.plugins.models.qwen3 import Qwen3, Qwen3Config
from titan.plugins.parallel.tensor import TensorConfig, TensorParallel, reduced
from titan.testing.ranks import RankError, run_ranks

# 251 words and 90 hidden units come out even over neither 2 nor 4 ranks, or only over 2.
SIZES: dict[str, Any] = {"n_layers": 2, "dim": 32, "n_heads": 8, "vocab_size": 251, "max_seq_len": 16, "ffn_dim": 90}
LLAMA, GPT, OLMO2 = "llama, grouped queries", "gpt, tied, biases", "olmo2, norms over all heads"
MODELS = {
    LLAMA: lambda: Llama(LlamaConfig(**SIZES, n_kv_heads=4)),
    "llama, tied": lambda: Llama(LlamaConfig(**SIZES, tied=True)),
    GPT: lambda: Gpt(GptConfig(**SIZES)),
    "bloom, slopes of heads": lambda: Bloom(BloomConfig(**SIZES)),
    "gemma, soft caps": lambda: Gemma(GemmaConfig(**SIZES, n_kv_heads=4, head_dim=6, sliding_window=5)),
    "neox, parallel branches": lambda: Neox(NeoxConfig(**SIZES, rotary_pct=0.5)),
    OLMO2: lambda: Olmo2(Olmo2Config(**SIZES, n_kv_heads=4)),
    "qwen3, norms of heads": lambda: Qwen3(Qwen3Config(**SIZES, n_kv_heads=4, head_dim=6)),
}


def _whole(model: Model) -> nn.Module:
    torch.manual_seed(1)
    module = model.build()
    with torch.no_grad():
        for parameter in module.parameters():  # zeros and ones would hide a wrong factor or a bias added twice
            parameter.normal_(std=0.3)
    return module


def _micro_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    tokens = torch.randint(0, 251, (2, 2, 17))
    tokens[0, :, -3:] = -100
    return [(row[:, :-1].clamp(min=0), row[:, 1:]) for row in tokens]


def _train(module: nn.Module) -> float:
    total = 0.0
    for tokens, labels in _micro_batches():
        loss, _ = CrossEntropy(LossConfig()).compute(logits_of(module, tokens), labels)
        (loss / 50).backward()
        total += loss.item()
    return total


def _context(model: Model) -> BuildContext:
    layout = Layout(tuple(TensorParallel.axes), {"tp": dist.get_world_size()})
    mesh = Mesh(layout, torch.device("cpu"), dist.get_rank())
    return BuildContext(job=None, mesh=mesh, spec=model.spec(), precision=Precision())  # type: ignore[arg-type]


def _split(name: str, **options: bool) -> tuple[ModelPart, TensorParallel]:
    """A model as a run splits it: layouts on the meta device, then storage, then values."""
    model, technique = MODELS[name](), TensorParallel(TensorConfig(**options))
    context = _context(model)
    with torch.device("meta"):
        part = ModelPart(model.build())
    technique.apply(part, context)
    part.module.to_empty(device="cpu")
    part.retie(context.spec)
    values = dict(_whole(model).named_parameters())
    for name, parameter in part.parameters():
        value, mesh = values[name].detach(), parameter.device_mesh
        parameter.detach().copy_(distribute_tensor(value, mesh, parameter.placements, src_data_rank=None))
    return part, technique


def _compare(name: str, options: dict[str, bool]) -> tuple[float, dict[str, float]]:
    """(relative difference of the loss, and of each gradient).

    A key's bias moves all scores of a query alike, which softmax forgets: its gradient is rounding alone. So what is
    below a hundredth of the largest gradient is measured against that.
    """
    whole = _whole(MODELS[name]())
    expected = _train(whole)
    part, technique = _split(name, **options)
    loss = _train(part.module)
    technique.after_backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    floor = 1e-2 * max(gradient.norm() for gradient in gradients.values())
    differences = {}
    for name, parameter in part.parameters():
        gradient, wanted = parameter.grad, gradients.pop(name)
        assert isinstance(gradient, DTensor), name
        assert gradient.placements == parameter.placements, name
        differences[name] = ((gradient.full_tensor() - wanted).norm() / wanted.norm().clamp(min=floor)).item()
    assert not gradients, f"not on the part: {list(gradients)}"
    return abs(loss - expected) / expected, differences


def _compare_all(name: str) -> list[tuple[str, float, dict[str, float]]]:
    keys = ("sequence_parallel", "loss_parallel")
    every = [dict(zip(keys, values, strict=True)) for values in itertools.product((True, False), repeat=2)]
    return [(str(options), *_compare(name, options)) for options in every]


KEPT = [(2, LLAMA), (4, LLAMA), (2, GPT), (2, OLMO2)]
OTHERS = [(4, model) for model in MODELS if model != LLAMA]


@pytest.mark.parametrize(("tp", "model"), sweep_but([*KEPT, *OTHERS], *KEPT))
def test_loss_and_gradients_are_those_of_one_process(tp: int, model: str) -> None:
    for rank in run_ranks(_compare_all, tp, model):
        for options, loss, gradients in rank:
            assert loss < 1e-6, options
            wrong = {name: difference for name, difference in gradients.items() if not difference < 1e-5}
            assert wrong == {}, options


def _collectives(name: str, sequence_parallel: bool) -> list[dict[str, int]]:
    part, _ = _split(name, sequence_parallel=sequence_parallel)
    tokens, labels = _micro_batches()[0]
    with CommDebugMode() as forward:
        logits = logits_of(part.module, tokens)
    loss, _ = CrossEntropy(LossConfig()).compute(logits, labels)
    with CommDebugMode() as backward:
        loss.backward()
    return [{str(op): n for op, n in mode.get_comm_counts().items()} for mode in (forward, backward)]


TWICE = 2 * SIZES["n_layers"]
PAIRS = {"all_gather_into_tensor": TWICE + 1, "reduce_scatter_tensor": TWICE + 1}


@pytest.mark.parametrize(
    ("model", "sequence_parallel", "expected"),
    [(GPT, True, PAIRS), (GPT, False, {"all_reduce": TWICE + 1}), (OLMO2, True, {**PAIRS, "all_reduce": TWICE})],
    ids=["slices", "whole sequences", "norms over all heads"],
)
def test_a_layer_communicates_twice_each_way(model: str, sequence_parallel: bool, expected: dict[str, int]) -> None:
    """And norms over all heads, of queries and of keys, add a sum each."""
    counts = {f"c10d_functional.{op}": count for op, count in expected.items()}
    assert run_ranks(_collectives, 2, model, sequence_parallel) == [[counts] * 2] * 2


def _tied_and_sliced() -> tuple[bool, list[tuple[int, ...]]]:
    model = MODELS[GPT]()
    with torch.device("meta"):
        part = ModelPart(model.build())
    TensorParallel(TensorConfig()).apply(part, _context(model))
    embed, output = (module._parameters["weight"] for module in (part.module.embed, part.module.output))
    sizes = [tuple(p.shape) for p in (part.module.embed.weight, part.module.layers["1"].ffn.down.weight)]
    return output is embed, sizes


def test_tied_weights_stay_one_tensor_and_slices_may_be_uneven() -> None:
    tied, sizes = zip(*run_ranks(_tied_and_sliced, 4), strict=True)
    assert tied == (True,) * 4
    assert list(zip(*sizes, strict=True)) == [((63, 32),) * 3 + ((62, 32),), ((32, 23),) * 3 + ((32, 21),)]


def _last_stage() -> list[str]:
    model = MODELS[LLAMA]()
    with torch.device("meta"):
        part = ModelPart(model.build(), stage=1, stages=2)
    part.module.embed = None
    del part.module.layers["0"]
    TensorParallel(TensorConfig()).apply(part, _context(model))
    return [name for name, parameter in part.parameters() if parameter.to_local().numel() < parameter.numel()]


def test_a_stage_is_split_as_far_as_it_goes() -> None:
    linears = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "ffn.w1", "ffn.w2", "ffn.w3")
    names = [f"layers.1.{name}.weight" for name in linears]
    assert run_ranks(_last_stage, 2) == [[*names, "output.weight"]] * 2


REFUSED = {
    "a parameter that the plan forgets": (
        LLAMA,
        lambda plan: {glob: style for glob, style in plan.items() if style != "norm"},
        r"PluginError: .*layers\.0\.attn_norm\.weight, .*norm\.weight",
    ),
    "a linear whose input nothing gathers": (
        LLAMA,
        lambda plan: {glob: style for glob, style in plan.items() if glob != "layers.*.ffn"},
        r'layers\.0\.ffn\.w1 as a "column", but no module around it is a "gather"',
    ),
    "a gather in a gather": (
        LLAMA,
        lambda plan: {"layers.*": "gather", **plan},
        r'layers\.0\.attn as a "gather", but a module around it gathers already',
    ),
    "a norm over features that nothing splits": (
        OLMO2,
        lambda plan: {**plan, "norm": "wide_norm"},
        r'has norm as a "wide_norm", but no module around it is a "gather"',
    ),
}


def _replanned(case: str) -> None:
    name, change, _ = REFUSED[case]
    context = _context(model := MODELS[name]())
    context.spec = dataclasses.replace(context.spec, tensor=change(context.spec.tensor))
    TensorParallel(TensorConfig()).apply(ModelPart(model.build()), context)


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_plan_is_refused(case: str) -> None:
    with pytest.raises(RankError, match=REFUSED[case][-1]):
        run_ranks(_replanned, 2, case)


class _Twice(nn.Module):
    """A feed-forward with the norm of its input inside: each rank's gradient of that norm is a summand."""

    def __init__(self, ffn: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.w1, self.w2, self.w3 = norm, ffn.w1, ffn.w2, ffn.w3

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


def _norm_inside() -> None:
    model = MODELS[LLAMA]()
    whole = _whole(model)
    for layer in whole.layers.values():
        layer.ffn, layer.ffn_norm = _Twice(layer.ffn, layer.ffn_norm), nn.Identity()
    context = _context(model)
    table = {glob.replace("ffn_norm", "ffn.norm"): style for glob, style in context.spec.tensor.items()}
    context.spec = dataclasses.replace(context.spec, tensor=table)
    technique = TensorParallel(TensorConfig(sequence_parallel=False))
    technique.apply(ModelPart(whole), context)
    _train(whole)
    technique.after_backward()


def test_a_norm_whose_gradient_differs_between_ranks_is_refused() -> None:
    with pytest.raises(RankError, match=r"PluginError: the gradient of layers\.0\.ffn\.norm\.weight differs between"):
        run_ranks(_norm_inside, 2)


def _rounded_otherwise() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of the norms before ranks differ by rounding, and after the technique has joined them."""
    part, technique = _split(LLAMA, sequence_parallel=False)
    _train(part.module)
    norms = {name: p.grad.to_local() for name, p in part.parameters() if "norm" in name}
    before = {name: gradient.clone() for name, gradient in norms.items()}
    for gradient in norms.values():
        gradient.mul_(1 + 1e-6 * dist.get_rank())
    technique.after_backward()
    return before, norms


def test_replicas_that_rounding_sets_apart_are_joined() -> None:
    (before, first), (_, second) = run_ranks(_rounded_otherwise, 2)
    assert len(first) == 5 and all(torch.equal(first[name], second[name]) for name in first)
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, before[name], rtol=1e-6, atol=0)


def _called(*more: Tensor, **named: Tensor) -> None:
    _split(LLAMA)[0].module.layers["0"].ffn(*more, **named)


@pytest.mark.parametrize(("more", "named"), [((), {"x": torch.zeros(1, 8, 32)}), ((torch.zeros(1, 8, 32),) * 2, {})])
def test_a_gather_takes_hidden_states_first_and_once(more: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
    with pytest.raises(RankError, match=r'SwiGLU is a "gather" .*first positional argument'):
        run_ranks(_called, 2, *more, **named)


def _graphs(name: str) -> int:
    counter, (part, _) = CompileCounter(), _split(name)
    for layer in part.module.layers.values():
        layer.forward = torch.compile(layer.forward, backend=counter, fullgraph=True)
    _train(part.module)
    return counter.frame_count


@pytest.mark.parametrize("model", [GPT, swept_case(OLMO2)])
def test_layers_share_one_compiled_graph(model: str) -> None:
    assert run_ranks(_graphs, 2, model) == [1, 1]


def _wide(norm: nn.Module) -> None:
    model = MODELS[OLMO2]()
    whole = _whole(model)
    whole.layers["1"].attn.k_norm = norm
    TensorParallel(TensorConfig()).apply(ModelPart(whole), _context(model))


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(16), nn.RMSNorm(16), nn.RMSNorm(16, eps=1e-6, elementwise_affine=False)],
    ids=["mean", "no eps", "no weight"],
)
def test_another_norm_over_all_heads_is_refused(norm: nn.Module) -> None:
    said = rf'layers\.1\.attn\.k_norm as a "wide_norm", but it is a {type(norm).__name__}; it must be an nn\.RMSNorm'
    with pytest.raises(RankError, match=f"{said} with"):
        run_ranks(_wide, 2, norm)


def _summands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1000, generator=generator).bfloat16() for _ in range(4)]


def _summed() -> Tensor:
    """Partial gradients in bf16 of a thousand numbers on 4 ranks, added up."""
    own = _summands()[dist.get_rank()]
    (sums,) = reduced({"w": own}, dist.group.WORLD, dist.ReduceOp.SUM)
    torch._foreach_copy_([own], sums)
    return own


def test_narrow_gradients_are_added_up_in_float32() -> None:
    """Rounded to bfloat16 once, whatever the number of ranks."""
    expected = torch.stack(_summands()).float().sum(0)
    for own in run_ranks(_summed, 4):
        torch.testing.assert_close(own.float(), expected, rtol=2**-8, atol=1e-6)
