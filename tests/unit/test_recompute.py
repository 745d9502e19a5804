"""Recomputation of attention alone: numbers, saved bytes, what it costs, and where it has no effect."""

import json
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.logits import logits_of
from tests.planned import CLUSTER, TOML, job_of
from titan.cli import main
from titan.config import load_job, without_effect
from titan.contracts import Batch, Model, ModelPart
from titan.contracts.base.cost import Attention, Recompute
from titan.layers.attention import AttentionCore, attend, attend_unfused, document_mask, shared_mask
from titan.planner.machine.cluster import MEMORY_LIMIT
from titan.planner.machine.kernels import Device
from titan.planner.search.space import load_base
from titan.planner.search.unset_options import settle
from titan.planner.step.activations import LayerMemory
from titan.planner.step.arithmetic import flops_per_token
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, peak_bytes
from titan.planner.step.predict import Planner
from titan.plugins.memory.activation_checkpoint import ActivationCheckpoint
from titan.plugins.models.gpt import Gpt
from titan.plugins.models.llama import Llama

CORE = ("--plugins.activation_checkpoint.mode", "attention")
SELECTIVE = ("--plugins.activation_checkpoint.mode", "selective")
UNFUSED = ("--model.attention", "unfused")


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_unfused_attention_is_the_same_function(kv_heads: int, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads))
    mask = document_mask(torch.tensor([[0] * 4 + [1] * 5, [0] * 9])) if masked else None
    both = [function(q, k, v, mask) for function in (attend, attend_unfused)]
    torch.testing.assert_close(*both)
    weight = torch.randn_like(both[0])
    torch.testing.assert_close(*(torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in both))


def _recomputed(part: ModelPart, spec: Any, ranks: int = 1, device: str = "cpu", **options: Any) -> None:
    """ranks: that slice sequences.  device: of the job, in which a technique compiles."""
    technique = ActivationCheckpoint(ActivationCheckpoint.Config(**options))
    job = load_job(TOML, ["--mesh.cp", str(ranks), "--plugins.compile.enabled", "true"], ranks)
    context = SimpleNamespace(spec=spec, techniques=job.techniques, job=job, device=torch.device(device))
    technique.apply(part, context)  # type: ignore[arg-type]


def _loss_and_gradients(part: ModelPart) -> tuple[Tensor, list[Tensor], int]:
    """And the bytes saved for backward besides parameters."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = logits_of(part.module, torch.arange(128).view(2, 64) % 251).logsumexp(-1).sum()
    parameters = {p.data_ptr() for _, p in part.parameters()}
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, saved)}
    size = sum(size for at, size in storages.items() if at not in parameters)
    loss.backward()
    return loss.detach(), [p.grad for _, p in part.parameters() if p.grad is not None], size


def _part(model: type[Model], mode: str, **options: Any) -> ModelPart:
    """Two layers of a tiny model under a mode; "": none."""
    plan = model(model.Config(**{**model.presets["tiny"], "n_layers": 2, **options}))
    torch.manual_seed(1)
    part = ModelPart(plan.build())
    if mode:
        _recomputed(part, plan.spec(), mode=mode)
    return part


def _run(model: type[Model], mode: str, **options: Any) -> tuple[Tensor, list[Tensor], int]:
    return _loss_and_gradients(_part(model, mode, **options))


@pytest.mark.parametrize("model", [Llama, Gpt])
def test_recomputing_scores_changes_no_bit_and_mode_attention_saves_them(model: type[Model]) -> None:
    plain, again, selective = (_run(model, mode, attention="unfused") for mode in ("", "attention", "selective"))
    for run in (again, selective):
        assert torch.equal(plain[0], run[0])
        assert len(plain[1]) == len(run[1]) and all(map(torch.equal, plain[1], run[1]))
    heads, layers = model.presets["tiny"]["n_heads"], 2
    assert plain[2] - again[2] >= layers * 4 * 2 * heads * 64 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window, packed", [(0, True), (5, True), (5, False)])
def test_all_layers_save_one_mask_in_the_compute_dtype(window: int, packed: bool, dtype: torch.dtype) -> None:
    options = {**Llama.presets["tiny"], "n_layers": 3, "sliding_window": window}
    net = Llama(Llama.Config(**options)).build().to(dtype)  # type: ignore[arg-type]
    documents = torch.arange(48).expand(2, 48) // 20 if packed else None
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logits_of(net, torch.arange(96).view(2, 48) % 251, documents)
    masks = [tensor.untyped_storage() for tensor in saved if tensor.shape[-2:] == (48, 48)]
    assert len(masks) >= 3
    [size] = {storage.data_ptr(): storage.nbytes() for storage in masks}.values()
    assert size == (2 if packed else 1) * 48 * 48 * dtype.itemsize


def test_no_mask_outlives_the_documents_that_it_is_of() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
    core, positions, documents = AttentionCore(window=3), torch.arange(8)[None], torch.arange(8)[None] // 2
    core(q, k, v, positions, documents).sum().backward()
    mask = weakref.ref(shared_mask(positions, documents, 3, [], 8, torch.float32))
    held = mask()
    assert held is not None and held is shared_mask(positions, documents, 3, [], 8, torch.float32)
    del held, documents
    assert mask() is None
    near = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril().triu(-2)
    assert torch.equal(core(q, k, v, positions), attend(q, k, v, near))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_documents_of_two_micro_batches_at_a_time(mode: str) -> None:
    """As in a pipeline: the second forward comes before the first backward, and makes another mask."""
    tokens = torch.arange(64).view(1, 64) % 251
    batches = [Batch(tokens, tokens, torch.arange(64)[None] // size) for size in (20, 7)]
    gradients = []
    for part in (_part(Llama, ""), _part(Llama, mode)):
        losses = [part.forward(batch.tokens, batch).logsumexp(-1).sum() for batch in batches]
        for loss in losses:
            loss.backward()
        gradients.append([p.grad for _, p in part.parameters()])
    assert all(map(torch.equal, *gradients))


def test_attention_without_scores_is_left_alone_and_the_run_says_so(capsys: pytest.CaptureFixture) -> None:
    plain, same = (_run(Llama, mode) for mode in ("", "attention"))
    assert plain[2] == same[2] and torch.equal(plain[0], same[0])
    assert _wrapped("sdpa") == 0 and _wrapped("unfused") == 2
    assert costs_of(job_of(*CORE)) == costs_of(job_of())
    [sentence] = without_effect(job_of(*CORE))
    assert sentence.startswith('[plugins.activation_checkpoint] mode = "attention" has no effect')
    assert without_effect(job_of(*CORE, *UNFUSED)) == []
    assert main(["plan", "--config", str(TOML), *CORE, "--json"]) == 0
    printed = capsys.readouterr()
    assert sentence in printed.err and json.loads(printed.out)["fits"]


def _wrapped(kind: str) -> int:
    """Cores of a tiny llama of two layers whose forward a mode has replaced."""
    part = _part(Llama, "attention", attention=kind)
    cores = [module for module in part.module.modules() if isinstance(module, AttentionCore)]
    assert len(cores) == 2
    return sum("forward" in vars(module) for module in cores)


def test_costs_are_one_product_and_the_passes_over_the_scores() -> None:
    job = job_of(*CORE, *UNFUSED)
    costs = costs_of(job)
    assert costs.recompute == Recompute(saved="all_but_scores")
    [core] = (op for op in costs.layer if isinstance(op, Attention))
    device = Device(CLUSTER)
    once, both = (device.core_again(core, costs, both=both) for both in (False, True))
    assert once < both == pytest.approx(device.operation(core, costs, costs.dtype).forward)
    model, hardware = flops_per_token(costs)
    products = 4 * costs.seq_len * core.heads * core.head_dim * job.spec.n_layers
    assert hardware - model == products / 2
    whole = replace(costs, recompute=Recompute(saved="all_but_scores", full_layer=True))
    assert flops_per_token(whole)[1] == model + products
    spent = Planner(CLUSTER).predict(costs, job.layout).time_s["recompute"]
    assert spent == pytest.approx(job.micro_batches * job.spec.n_layers * once)


def test_selective_recomputation_repeats_attention_that_writes_its_scores() -> None:
    flash, written = (costs_of(job_of(*SELECTIVE, *words)) for words in ((), UNFUSED))
    [core] = (op for op in written.layer if isinstance(op, Attention))
    layout, layers = job_of().layout, job_of().spec.n_layers
    spent = [Planner(CLUSTER).predict(costs, layout).time_s["recompute"] for costs in (flash, written)]
    forward = Device(CLUSTER).operation(core, written, written.dtype).forward
    assert spent[1] - spent[0] == pytest.approx(written.micro_batches * layers * forward)
    models, hardware = zip(*map(flops_per_token, (flash, written)), strict=True)
    assert hardware[0] == models[0] == models[1]
    assert hardware[1] - models[1] == 4 * written.seq_len * core.heads * core.head_dim * layers


def test_a_recomputed_layer_saves_all_but_its_scores() -> None:
    def layer(seq_len: int, *words: str) -> LayerMemory:
        return LayerMemory(costs_of(job_of("--data.seq_len", str(seq_len), *words)), fused_norms=True, ways=1)

    for seq_len in (16, 64):
        flash, written, again = layer(seq_len), layer(seq_len, *UNFUSED), layer(seq_len, *UNFUSED, *CORE)
        job = job_of("--data.seq_len", str(seq_len))
        tokens, heads = job.micro_batch * seq_len, job.spec.n_heads
        assert again.full == written.full == again.least + again.again
        assert again.again == 4 * tokens * heads * seq_len
        # A flash kernel saves one float32 number per token and head instead.
        assert again.least == flash.full - 4 * tokens * heads
        # Selective mode saves the result of a flash kernel and its statistics, but no product of written scores.
        plain, selective = layer(seq_len, *SELECTIVE), layer(seq_len, *UNFUSED, *SELECTIVE)
        assert plain.least - selective.least == 4 * tokens * (job.spec.dim + heads)


@pytest.mark.parametrize(("words", "searched"), [((), False), (UNFUSED, True)])
def test_a_search_tries_the_mode_where_it_has_an_effect(words: Sequence[str], searched: bool) -> None:
    base = load_base(TOML, ["=".join(words)] if words else [])
    space = base.space(2, 2)
    plain = [dict(chosen) for layout in space.layouts() for chosen, _ in space.options(layout)]
    tried = {chosen["activation_checkpoint"] for chosen in plain}
    assert ((("mode", "attention"),) in tried) is searched and (("mode", "full"),) in tried


def _counted(forward: Callable[..., Tensor], calls: list[int]) -> Callable[..., Tensor]:
    """A forward that draws a number with each call, and adds it to `calls`."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(int(torch.randint(100, ())))
        return forward(*args, **kwargs)

    return call


def _compiled(**options: Any) -> tuple[tuple[Tensor, list[Tensor], int], int]:
    """As `_run`, of one compiled layer under a mode; and how often it was called."""
    torch.compiler.reset()
    model, calls = Llama(Llama.Config(**{**Llama.presets["tiny"], "n_layers": 1})), []  # type: ignore[arg-type]
    torch.manual_seed(1)
    part = ModelPart(model.build())
    compiled = partial(torch.compile, backend="aot_eager_decomp_partition")
    part.wrap_forward("layers.0", "compile", lambda forward: _counted(compiled(forward), calls))
    _recomputed(part, model.spec(), **options)
    return _loss_and_gradients(part), len(calls)


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler reads .grad, and what PyTorch deprecates
def test_whole_blocks_are_recomputed_in_their_graph_or_called_again_where_ranks_exchange() -> None:
    modes = (("none", 1), ("full", 1), ("full", 2))
    runs, calls = zip(*(_compiled(mode=mode, ranks=ranks) for mode, ranks in modes), strict=True)
    assert calls == (1, 1, 2)
    state = torch.get_rng_state().nbytes  # of attention's generator, which a graph saves on a CPU
    assert runs[1][2] - state <= runs[2][2] < runs[0][2] / 2
    for loss, gradients, _ in runs[1:]:
        torch.testing.assert_close((loss, gradients), runs[0][:2], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device, moved", [("cpu", True), ("cuda", False)])
def test_compiling_for_cuda_takes_no_number_of_the_host_s_generator(device: str, moved: bool) -> None:
    part = _part(Llama, "")
    part.wrap_forward("layers.0", "compile", partial(_counted, calls=[]))
    _recomputed(part, Llama(Llama.Config(**Llama.presets["tiny"])).spec(), mode="full", device=device)
    before = torch.get_rng_state()
    logits_of(part.module, torch.arange(64).view(1, 64))
    assert torch.equal(torch.get_rng_state(), before) is not moved


class _Net(nn.Module):
    """A net of one block that has no parameters."""

    def __init__(self, block: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(block)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers[0](x)
        return result


class _Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def _graphs(block: Callable[[Tensor], Tensor]) -> list[Counter[Any]]:
    """The operations of a block's compiled forward and backward, recomputed whole."""
    graphs: list[Counter[Any]] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(Counter(node.target for node in graph.graph.nodes))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    part = ModelPart(_Net(block))
    part.wrap_forward("layers.0", "compile", partial(torch.compile, backend=backend))
    _recomputed(part, job_of().spec, mode="full")
    x = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    part.module(x).sum().backward()
    return graphs


@pytest.mark.filterwarnings("ignore")  # as above
def test_no_graph_recomputes_what_draws() -> None:
    """Its generators would not be those that the run watches."""
    forward, backward = _graphs(lambda x: F.scaled_dot_product_attention(x, x, x))
    assert forward and backward
    with pytest.raises(Exception, match="draws random numbers"):
        _graphs(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_graph_recomputes_all_but_choices() -> None:
    def routed(x: Tensor) -> Tensor:
        scores = x.exp()
        return scores.gather(-1, scores.topk(2).indices)

    forward, backward = _graphs(routed)
    made = [(graph[torch.ops.aten.topk.default], graph[torch.ops.aten.exp.default]) for graph in (forward, backward)]
    assert made == [(1, 1), (0, 1)]


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler reads .grad, and what PyTorch deprecates
def test_a_compiler_saves_less_on_a_smaller_budget_and_computes_the_same() -> None:
    runs = [_compiled(mode="budget", budget=budget)[0] for budget in (1.0, 0.5, 0.0)]
    saved = [run[2] for run in runs]
    assert saved[0] > saved[1] > saved[2]
    for loss, gradients, _ in runs[1:]:
        torch.testing.assert_close((loss, gradients), runs[0][:2], rtol=1e-6, atol=1e-7)


def test_a_budget_needs_a_compiler(capsys: pytest.CaptureFixture) -> None:
    words = ["plan", "--config", str(TOML), "--plugins.activation_checkpoint.mode", "budget"]
    assert main(words) == 2
    assert 'mode = "budget" is chosen by a compiler, but no technique compiles blocks' in capsys.readouterr().err
    assert main([*words, "--plugins.compile.enabled", "true"]) == 0
    capsys.readouterr()
    assert main([*words, "--plugins.compile.backend", "eager"]) == 2
    assert "needs a compiler that chooses what is saved, but" in capsys.readouterr().err


def test_a_budget_is_planned_between_all_and_nothing() -> None:
    def planned(*words: str) -> tuple[float, float]:
        job = job_of("--plugins.compile.enabled", "true", *words)
        predicted = Planner(CLUSTER).predict(costs_of(job), job.layout)
        return predicted.memory[0].activations, predicted.step_time_s

    def within(budget: float) -> tuple[float, float]:
        words = ("--plugins.activation_checkpoint.mode", "budget", "--plugins.activation_checkpoint.budget")
        return planned(*words, str(budget))

    assert within(1.0) == planned()
    full = planned("--plugins.activation_checkpoint.mode", "full")
    assert within(0.0)[0] == pytest.approx(full[0], rel=1e-9)
    (most, fast), (half, between), (least, slow) = map(within, (1.0, 0.5, 0.0))
    assert most > half > least and fast < between < slow


AUTO = ("--plugins.activation_checkpoint.mode", "auto")


def _gib(*words: str) -> float:
    job = job_of(*words)
    return peak_bytes(costs_of(job), job.layout, CLUSTER.memory) / GIB


def test_auto_is_the_least_recomputation_that_fits() -> None:
    modes = ["none", "selective", "full"]
    sizes = [_gib(*AUTO[:1], mode) for mode in modes]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == _gib(*AUTO)
    for mode, size in zip(modes, sizes, strict=True):
        job, said = settle(job_of(*AUTO), CLUSTER.memory._replace(gib=1.0001 * size / MEMORY_LIMIT))
        chosen = next(t.config for t in job.techniques if t.name == "activation_checkpoint")
        assert chosen.mode == (mode if mode != "none" else "auto")
        [sentence] = [words for words in said if "activation_checkpoint" in words]
        assert f'mode is "auto", so mode = "{mode}": ' in sentence and "GiB" in sentence


def test_auto_recomputes_nothing_where_memory_is_not_known() -> None:
    job, said = settle(job_of(*AUTO), None)
    assert costs_of(job).recompute is None
    assert any('mode is "auto", so mode = "none": the memory of the device is not known' in words for words in said)
