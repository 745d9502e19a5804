"""Stacks of linears, experts behind a router, losses beside the objective, and what keeps experts equally busy."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.sweeps import swept_case
from titan.errors import ConfigError, PluginError
from titan.layers import experts as layers
from titan.layers.experts import Experts, SideLoss, StackedLinear, gather_rows, inverse, stacked_product
from titan.plugins.models.moe import MixtureOfExperts
from titan.plugins.models.moe.mixture import Mixture, MixtureConfig, imbalance_of

COUNTS = torch.tensor([3, 0, 5, 0])
UPDATED, SKIPPED = torch.tensor(True), torch.tensor(False)


def _drawn(module: nn.Module, std: float = 1.0) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def test_each_row_passes_the_linear_of_its_expert() -> None:
    linear, rows = _drawn(StackedLinear(len(COUNTS), 16, 8)), torch.randn(8, 16)
    of = torch.arange(len(COUNTS)).repeat_interleave(COUNTS)
    wanted = torch.stack([linear.weight[e] @ row for e, row in zip(of, rows, strict=True)])
    torch.testing.assert_close(linear(rows, COUNTS), wanted)


@pytest.mark.parametrize("counts", [COUNTS, torch.zeros(4, dtype=torch.int64)])
def test_gradients_of_a_stack(counts: Tensor) -> None:
    rows = torch.randn(int(counts.sum()), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    stacked_product(rows, weight, counts).sum().backward()
    assert weight.grad is not None and not weight.grad[counts == 0].any()  # zeros, not None: they are to be reduced
    if len(rows):
        torch.autograd.gradcheck(lambda r, w: stacked_product(r, w, counts), (rows, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_and_a_loop_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is CUDA's, but PyTorch has it on CPUs too."""
    linear = _drawn(StackedLinear(len(COUNTS), 16, 8)).to(dtype)
    rows = torch.randn(8, 16, dtype=dtype, requires_grad=True)
    found = []
    assert not layers.has_kernel(rows), "on a CPU"
    for has_kernel in (False, True):
        monkeypatch.setattr(layers, "has_kernel", lambda *tensors, has=has_kernel: has)
        rows.grad = linear.weight.grad = None
        result = linear(rows, COUNTS)
        result.float().square().sum().backward()
        found.append((result.detach(), rows.grad, linear.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_token_gets_the_weighted_sum_of_its_experts() -> None:
    experts, x = _drawn(Experts(4, 6, 5)), torch.randn(7, 6)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    w1, w2, w3 = experts.w1.weight, experts.w2.weight, experts.w3.weight

    def expert(e: int, token: Tensor) -> Tensor:
        return w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token))

    rows = [sum(weights[t, i] * expert(int(chosen[t, i]), x[t]) for i in range(2)) for t in range(7)]
    wanted = torch.stack(rows)  # type: ignore[arg-type]
    torch.testing.assert_close(experts(x, chosen, weights), wanted)
    assert experts.computed == 14


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch, while it compiles
def test_rows_and_their_gradients_are_those_of_indexing(copies: int, compiled: bool) -> None:
    order = torch.randperm(7 * copies)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    above = torch.randn(7 * copies, 5, dtype=torch.float64)
    gather = torch.compile(gather_rows, backend="aot_eager", fullgraph=True) if compiled else gather_rows
    rows = gather(x, order, inverse(order), copies)
    assert torch.equal(rows, x[order // copies])
    (expected,) = torch.autograd.grad(x[order // copies], x, above)
    torch.testing.assert_close(torch.autograd.grad(rows, x, above)[0], expected)


def test_gradients_of_a_row_s_copies_are_added_in_their_order_and_rounded_once() -> None:
    """Whichever experts come first, and with nothing that adds rows up one by one."""
    x, above = torch.randn(7, 8, requires_grad=True), torch.randn(7, 4, 8).bfloat16()
    for order in (torch.arange(28), torch.randperm(28), torch.arange(28).flip(0)):
        rows = gather_rows(x.bfloat16(), order, inverse(order), 4)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            (gradient,) = torch.autograd.grad(rows, x, above.flatten(0, 1)[order])
        assert torch.equal(gradient, above.sum(1).float())
        assert not {"aten::index_put_", "aten::_index_put_impl_", "aten::index_add_"} & {e.name for e in seen.events()}
    torch.testing.assert_close(gradient, above.double().sum(1).float(), rtol=2**-8, atol=0)


def test_two_techniques_cannot_both_replace_experts() -> None:
    experts = _drawn(Experts(4, 6, 5))
    experts.use(experts.compute, "first")
    with pytest.raises(PluginError, match="techniques first and second both replace what experts compute"):
        experts.use(experts.compute, "second")


def test_a_side_loss_adds_its_share_of_a_gradient() -> None:
    side, weight = SideLoss(), torch.tensor([2.0, 3.0], requires_grad=True)
    side.share = 0.25
    y = side(weight * 5, weight.square().sum())
    torch.testing.assert_close(y, weight * 5)
    y.sum().backward()
    torch.testing.assert_close(weight.grad, 5 + 0.25 * 2 * weight.detach())


def test_imbalance_is_one_where_tokens_are_spread_evenly_and_the_stack_where_one_expert_has_all() -> None:
    even = torch.arange(8).view(2, 4, 1) % 4
    uniform = torch.full((2, 4, 4), 0.25)
    assert imbalance_of(even, uniform) == 2  # of two sequences
    one = torch.tensor([1.0, 0, 0, 0]).expand(1, 8, 4)
    assert imbalance_of(torch.zeros(1, 8, 1, dtype=torch.int64), one) == 4


def test_imbalance_of_padded_sequences_is_that_of_their_tokens() -> None:
    """By the formula, token by token; padding has scores that would show."""
    lengths, k, experts = (5, 2, 8), 2, 4
    shares = torch.rand(3, 8, experts).softmax(-1)
    chosen = shares.topk(k).indices
    wanted = 0.0
    for row, length in enumerate(lengths):
        for e in range(experts):
            f = experts / (k * length) * sum(int((chosen[row, t] == e).sum()) for t in range(length))
            wanted += f * sum(float(shares[row, t, e]) for t in range(length)) / length
    real = torch.arange(8) < torch.tensor(lengths)[:, None]
    torch.testing.assert_close(imbalance_of(chosen, shares, real), torch.tensor(wanted))


@pytest.mark.parametrize(
    ("router", "balance"), [("softmax", "bias"), ("sigmoid", "sequence"), swept_case(("softmax", "sequence"))]
)
def test_padding_takes_no_part_in_counts_entropies_and_gradients(router: str, balance: str) -> None:
    """Two padded samples together have what both have, each alone and as long as it is."""
    model, module = _model(n_experts=4, router=router, balance=balance, balance_rate=0.1, n_shared_experts=1)
    own = module.layers["0"].ffn.router
    tokens, positions, lengths = torch.randint(1, 11, (2, 6)), torch.arange(6).expand(2, 6), torch.tensor([2, 5])
    real = positions < lengths[:, None]
    tokens[~real] = 0

    def run(given: Tensor, places: Tensor, mask: Tensor, lengths: Tensor | None = None) -> None:
        (module(given, places, lengths=lengths).logsumexp(-1) * mask).sum().backward()

    def ended() -> tuple[list[int], dict[str, Tensor | None], list[Tensor]]:
        counts = own.counts.tolist()
        model.after_step(module, lambda counts: counts, UPDATED)
        gradients = [parameter.grad.clone() for parameter in module.parameters()]
        module.zero_grad()
        for name, buffer in module.named_buffers():
            if name.endswith("router.bias"):
                buffer.zero_()
        return counts, {**model.measure(module)}, gradients

    run(tokens, positions, real, lengths)
    counts, measured, gradients = ended()
    for row, length in enumerate(lengths.tolist()):
        run(tokens[row : row + 1, :length], positions[:1, :length], real[row : row + 1, :length])
    counts_alone, measured_alone, gradients_alone = ended()
    assert counts == counts_alone and sum(counts) == 2 * 7
    assert measured["expert_load"] == measured_alone["expert_load"]
    entropy, entropy_alone = (each["layers.0.router_entropy"] for each in (measured, measured_alone))
    assert entropy is not None and entropy[1] == 7
    torch.testing.assert_close(entropy.float(), entropy_alone.float())
    assert measured["layers.0.dropped_share"].tolist() == [0, 24], "rows of padding are routed and computed"
    for ours, theirs in zip(gradients, gradients_alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _model(**config: object) -> tuple[MixtureOfExperts, nn.Module]:
    model = MixtureOfExperts(MixtureConfig(n_layers=2, dim=16, n_heads=2, vocab_size=11, expert_dim=8, **config))  # type: ignore[arg-type]
    return model, _drawn(model.build(), 0.3)


def test_the_bias_moves_towards_even_counts_and_changes_the_choice_alone() -> None:
    model, module = _model(n_experts=4, top_k=1, balance_rate=0.5, normalized=False)
    router = module.layers["0"].ffn.router
    router.counts.copy_(torch.tensor([6, 1, 3, 2]))  # 3 on average
    model.after_step(module, lambda counts: counts, UPDATED)
    assert router.bias.tolist() == [-0.5, 0.5, 0.0, 0.5] and not router.counts.any()
    router.bias.copy_(torch.tensor([9.0, 0, 0, 0]))
    x = torch.randn(5, 16)
    chosen, weights, shares = router(x)
    assert not chosen.any()
    torch.testing.assert_close(shares, (x @ router.weight.T).softmax(-1))
    torch.testing.assert_close(weights, shares[:, :1])


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [True, False])
def test_weights_are_scores(router: str, normalized: bool) -> None:
    _, module = _model(n_experts=4, top_k=2, router=router, normalized=normalized, balance="none")
    own, x = module.layers["0"].ffn.router, torch.randn(5, 16)
    chosen, weights, shares = own(x)
    logits = x @ own.weight.T
    scores = logits.softmax(-1) if router == "softmax" else logits.sigmoid()
    best = scores.topk(2).values
    torch.testing.assert_close(weights, best / best.sum(-1, keepdim=True) if normalized else best)
    torch.testing.assert_close(shares.sum(-1), torch.ones(5))
    assert chosen.tolist() == scores.topk(2).indices.tolist()


def test_rows_of_metrics_name_the_layers_that_have_experts() -> None:
    model, module = _model(n_dense_layers=1, n_experts=4)
    tokens = torch.randint(0, 11, (2, 6))
    module(tokens, torch.arange(6).expand(2, 6))
    model.after_step(module, lambda counts: counts, UPDATED)
    found = model.measure(module)
    assert (
        set(found)
        == set(model.measures)
        == {"expert_load", "layers.1.expert_load", "layers.1.router_entropy", "layers.1.dropped_share"}
    )
    assert found["expert_load"] >= 1
    assert found["layers.1.dropped_share"].tolist() == [0, 24]
    nats, tokens_seen = found["layers.1.router_entropy"].tolist()
    assert tokens_seen == 12 and 0 < nats < 12 * torch.tensor(4.0).log()
    assert model.measure(module)["layers.1.dropped_share"].tolist() == [0, 0]  # counted since the last row
    module.eval()(tokens, torch.arange(6).expand(2, 6))
    ffn = module.layers["1"].ffn
    assert not ffn.router.counts.any() and not ffn.router.entropy.any() and not ffn.experts.computed


def test_a_skipped_step_moves_no_bias_and_leaves_no_trace_in_rows() -> None:
    """Even where all that its forward has counted is NaN, or of choices among NaN."""
    model, module = _model(n_experts=4, balance_rate=0.5)
    router = module.layers["0"].ffn.router
    tokens, positions = torch.randint(0, 11, (2, 6)), torch.arange(6).expand(2, 6)
    module(tokens, positions)
    model.after_step(module, lambda counts: counts, UPDATED)
    bias, load = router.bias.clone(), router.load.clone()
    assert bias.any()
    nn.init.constant_(module.embed.weight, torch.nan)
    module(tokens, positions)
    assert router.counts.any() and router.entropy.isnan().any()
    model.after_step(module, lambda counts: counts, SKIPPED)
    assert torch.equal(router.bias, bias) and not router.counts.any() and not router.entropy.any()
    found = model.measure(module)
    assert found["layers.0.expert_load"] == load.max() / load.double().mean()
    assert found["layers.0.router_entropy"].isfinite().all() and found["layers.0.router_entropy"][1] == 12
    assert found["layers.0.dropped_share"].tolist() == [0, 48], "rows of both steps are computed"


def test_parameters_are_those_of_the_spec() -> None:
    for dense, shared, balance in itertools.product((0, 1), (0, 2), ("bias", "none")):
        model, module = _model(n_dense_layers=dense, n_shared_experts=shared, balance=balance, n_experts=4)
        spec = model.spec()
        assert spec.params == sum(p.numel() for p in module.parameters())
        named = module.named_modules(), module.named_parameters(), module.named_buffers(remove_duplicate=False)
        spec.check_names(*([name for name, _ in each] for each in named))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"top_k": 5, "n_experts": 4}, "top_k 5 must be at most n_experts 4; nearest: top_k 4"),
        ({"n_dense_layers": 2}, "n_dense_layers 2 must be less than n_layers 2; nearest: 1"),
        ({"head_dim": 7}, "head_dim 7 must be even; nearest: 6 or 8"),
        ({"n_kv_heads": 3}, "n_heads 2 must be divisible by n_kv_heads 3"),
    ],
)
def test_sizes_that_cannot_work(config: dict[str, object], told: str) -> None:
    model = MixtureOfExperts(MixtureConfig(n_layers=2, dim=16, n_heads=2, **config))  # type: ignore[arg-type]
    assert any(told in sentence for sentence in model.check()), list(model.check())


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [("mixtral-8x7b", 46.70e9, 12.88e9), ("qwen3-30b-a3b", 30.53e9, 3.35e9), ("deepseek-moe-16b", 16.38e9, 2.83e9)],
)
def test_published_sizes(preset: str, total: float, active: float) -> None:
    """Parameters, as their reports have them; active ones are those that a token passes, with both tables."""
    model = MixtureOfExperts(MixtureConfig(**MixtureOfExperts.presets[preset]))
    assert model.spec().params == pytest.approx(total, rel=2e-3)
    assert model.spec().active_params == pytest.approx(active, rel=5e-3)


def test_a_hugging_face_folder_of_another_architecture() -> None:
    with pytest.raises(ConfigError, match="mlp_only_layers = \\[3\\]: this model's dense layers are its first"):
        MixtureOfExperts.from_hf({**_model(qk_norm=True, balance="none")[0].hf_config(), "mlp_only_layers": [3]})
    with pytest.raises(ConfigError, match=r"balance = 'bias': Mixtral.* has only 'sequence' or 'none'"):
        _model(n_experts=4)[0].hf_config()
    with pytest.raises(ConfigError, match=r"router = 'sigmoid': Qwen3Moe.* has only 'softmax'"):
        _model(qk_norm=True, balance="none", router="sigmoid")[0].hf_config()
    mixtral = _model(balance="none")[0].hf_config()
    del mixtral["rope_theta"]
    assert MixtureOfExperts.from_hf(mixtral)["rope_theta"] == 1e6  # what transformers takes where none is said


def test_shared_experts_are_passed_by_every_token() -> None:
    mixture = _drawn(Mixture(MixtureConfig(dim=16, n_experts=4, expert_dim=8, n_shared_experts=2)), 0.3)
    x = torch.randn(1, 3, 16)
    whole = mixture(x)
    nn.init.zeros_(mixture.experts.w2.weight)
    assert mixture.shared is not None
    torch.testing.assert_close(mixture(x), mixture.shared(x))
    assert not torch.allclose(whole, mixture.shared(x))
