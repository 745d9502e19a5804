"""Mixtures of experts: decoders in which a router sends each token through a few of many feed-forwards.

A layer is `h = x + attn(norm(x))`, `y = h + ffn(norm(h))`. The first `n_dense_layers` have a SwiGLU as `ffn`, the rest

    ffn(x) = shared(x) + sum over the top_k experts e of x:  w_e(x) expert_e(x),

with experts and `shared` SwiGLUs too (arXiv 2101.03961, 2401.06066). Scores s = softmax(R x) or sigmoid(R x), in
float32, choose the experts; w_e is s_e, or s_e over the sum of the chosen scores with `normalized`. No token is dropped
(arXiv 2211.15841). Attention and rotary positions are those of `titan.layers`.

What keeps experts equally busy is `balance`:

bias      a number per expert is added to the scores that choose, not to the weights. After each step it grows by
          `balance_rate` for experts with fewer tokens than the mean and shrinks for the others (arXiv 2408.15664). The
          tokens are those of the whole step, so the curve is the same at every layout.
sequence  balance_rate * sum over experts of f_e P_e is added to the objective, as a mean over sequences: f_e is E / k
          times the share of a sequence's tokens that chose e, P_e its mean score (arXiv 2412.19437, eq. 17 to 20).
none      nothing, as for finetuning.

Padding (`data.packing = "pad"`) is routed and computed as tokens are, but takes no part in `balance` and in measures:
f, P, counts and entropies are those of tokens, whether these have labels or not.

With dim D, E experts of F hidden units, k of them per token, and S shared ones, a mixture has 3 D F (E + S) + D E
parameters, of which a token is multiplied by 3 D F (k + S) + D E. It saves 2 D k + 4 F (k + S) + D numbers per token.

Limits: a sequence is at most `max_seq_len` long. `balance = "sequence"` needs whole sequences on each rank. Chosen
experts jump where two scores are equal, so layouts agree to rounding only as long as none are within it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titan.contracts import HfTensor, Measure, Model, ModelSpec, register
from titan.contracts.base.cost import Elementwise, Matmul, Operation, SavedTensor, linear, saved_by_gate, shared
from titan.contracts.base.spec import ZEROS, TensorStyle, nearest
from titan.errors import ConfigError, ConfigIssue
from titan.layers import huggingface
from titan.layers.blocks import LayerPart, PreNormLayer, SelfAttention, SwiGLU, pre_norm, swiglu
from titan.layers.decoder import Decoder, decoder_spec
from titan.layers.philox import jitter_cost
from titan.layers.rotary import Rotary

from .mixture import Mixture, MixtureConfig, Router


def _mixture(c: MixtureConfig) -> LayerPart:
    """`Mixture` as data, under the name `ffn`."""
    d, f, k, of = c.dim, c.expert_dim, c.top_k, 1 - c.n_dense_layers / c.n_layers
    product, elementwise = partial(Matmul, stack=c.n_experts, used=k), partial(Elementwise, region="seq_full")
    rows, hidden = SavedTensor(numel=d * k, region="seq_full"), partial(SavedTensor, region="tp_sharded")
    operations: list[Operation] = [
        shared(d, 2 + bool(c.n_shared_experts)),
        *((jitter_cost(d),) if c.router_jitter else ()),
        replace(linear("ffn.router", d, c.n_experts), saved=(SavedTensor(numel=d, region="seq_full", itemsize=4),)),
        elementwise(forward=2 * d * k, backward=2 * d * k, saved=(rows,)),  # rows sorted by expert
        product(module="ffn.experts.w1", inputs=d, outputs=f),
        product(module="ffn.experts.w3", inputs=d, outputs=f),
        Elementwise(region="tp_sharded", forward=5 * f * k, backward=8 * f * k, saved=saved_by_gate(f * k)),
        product(module="ffn.experts.w2", inputs=f, outputs=d, saved=(hidden(numel=f * k),)),
        elementwise(forward=3 * d * k, backward=3 * d * k, saved=(rows,)),  # weighted and added up
    ]
    tensor: dict[str, TensorStyle] = {
        "ffn": "mixture",
        "ffn.router": "router",
        "ffn.experts.w1": "column",
        "ffn.experts.w3": "column",
        "ffn.experts.w2": "summand",
    }
    if c.n_shared_experts:
        always = swiglu(d, c.n_shared_experts * f).operations[1:]
        operations += [_renamed(op, "ffn.", "ffn.shared.") for op in always]
        tensor |= {"ffn.shared.w1": "column", "ffn.shared.w3": "column", "ffn.shared.w2": "summand"}
    draws = ("ffn.jitter",) if c.router_jitter else ()
    return LayerPart(tuple(replace(op, of_layers=of) for op in operations), tensor, draws)


def _renamed(op: Operation, old: str, new: str) -> Operation:
    return replace(op, module=op.module.replace(old, new, 1)) if isinstance(op, Matmul) else op


def _sizes(
    n_layers: int, dim: int, n_heads: int, n_kv_heads: int, vocab_size: int, max_seq_len: int, **more: Any
) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "dim": dim, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return {**sizes, "vocab_size": vocab_size, "max_seq_len": max_seq_len, **more}


def _experts(n_experts: int, top_k: int, expert_dim: int, **more: Any) -> dict[str, Any]:
    sizes = {"n_experts": n_experts, "top_k": top_k, "expert_dim": expert_dim}
    return {**sizes, "balance": "sequence", "balance_rate": 1e-3, **more}


@register
class MixtureOfExperts(Model):
    """Mixtures of experts: a router sends each token through a few of many feed-forwards."""

    name = "moe"
    Config = MixtureConfig
    config: MixtureConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mixtral-8x7b": _sizes(32, 4096, 32, 8, 32000, 32768) | _experts(8, 2, 14336),
        "qwen3-30b-a3b": _sizes(48, 2048, 32, 4, 151936, 32768, head_dim=128, qk_norm=True, norm_eps=1e-6)
        | _experts(128, 8, 768, ffn_dim=6144),
        "deepseek-moe-16b": _sizes(28, 2048, 16, 16, 102400, 4096, norm_eps=1e-6, rope_theta=1e4)
        | _experts(64, 6, 1408, n_shared_experts=2, n_dense_layers=1, ffn_dim=10944, normalized=False),
        "moe-tiny": {},
    }
    measures: ClassVar[Mapping[str, Measure]] = {
        "expert_load": Measure("tokens of the busiest expert of all layers, over the mean of its layer", "max"),
        "layers.N.expert_load": Measure("the same of layer N", "max", detail=True),
        "layers.N.router_entropy": Measure("mean entropy of a token's scores in layer N, in nats", "mean", detail=True),
        "layers.N.dropped_share": Measure("chosen rows of layer N that no expert computed", "mean", detail=True),
    }

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        total, each = next(iter(self.measures)), list(self.measures)[1:]
        numbers = range(config.n_dense_layers, config.n_layers)
        names = {name.replace("N", str(i)): self.measures[name] for i in numbers for name in each}
        self.measures = {total: self.measures[total], **names}  # type: ignore[misc]

    def check(self) -> Iterable[str]:
        c = self.config
        if c.top_k > c.n_experts:
            yield f"top_k {c.top_k} must be at most n_experts {c.n_experts}; nearest: top_k {c.n_experts}"
        if c.n_dense_layers >= c.n_layers:
            most = c.n_layers - 1
            yield f"n_dense_layers {c.n_dense_layers} must be less than n_layers {c.n_layers}; nearest: {most}"
        if c.head_dim is None and c.dim % (2 * c.n_heads):
            dims = nearest(c.dim, step=2 * c.n_heads)
            yield (
                f"dim {c.dim} over n_heads {c.n_heads} gives no even number of features per head; nearest: dim {dims}, "
                "or set head_dim"
            )
        elif c.heads.head_dim % 2:
            yield f"head_dim {c.head_dim} must be even; nearest: {nearest(c.heads.head_dim, step=2)}"
        yield from c.grouping()

    def spec(self) -> ModelSpec:
        c = self.config
        moe, dense = _mixture(c), swiglu(c.dim, c.ffn_dim)
        share = c.n_dense_layers / c.n_layers
        operations = (*moe.operations, *(replace(op, of_layers=share) for op in dense.operations if share))
        styles = {**dense.tensor, **moe.tensor} if share else moe.tensor
        layer = pre_norm(c.dim, c.heads.part(), LayerPart(operations, styles, moe.draws), vectors=1)
        spec = decoder_spec(c, layer, ffn_dim=c.expert_dim, vectors=1)
        # Both feed-forwards are named `ffn`: that of a dense layer is named with its number, and first.
        first = {f"layers.{i}.{name}": style for i in range(c.n_dense_layers) for name, style in dense.tensor.items()}
        own = {f"layers.*.{name}" for name in dense.tensor if name not in moe.tensor}
        tensor = first | {glob: style for glob, style in spec.tensor.items() if glob not in own}
        buffers = [f"router.{name}" for name in ("counts", "entropy", "entropies", "routed")] + ["experts.computed"]
        buffers += ["router.bias"] if c.balance == "bias" else []
        whole = 'balance = "sequence" counts the experts of whole sequences; set balance = "bias" in [model]'
        return replace(
            spec,
            tensor=tensor,
            buffers={f"layers.*.ffn.{name}": ZEROS for name in buffers},
            whole_sequences=whole if c.balance == "sequence" else "",
        )

    def build(self) -> nn.Module:
        c = self.config
        norm = partial(nn.RMSNorm, c.dim, eps=c.norm_eps)

        def layer(number: int) -> nn.Module:
            ffn = SwiGLU(c.dim, c.ffn_dim) if number < c.n_dense_layers else Mixture(c)
            return PreNormLayer(norm(), SelfAttention(c.heads), norm(), ffn, ffn_by_token=isinstance(ffn, Mixture))

        rotary = Rotary(head_dim=c.heads.head_dim, theta=c.rope_theta)
        return Decoder(c, map(layer, range(c.n_layers)), norm(), rotary=rotary, tells_padding=True)

    def after_step(self, module: nn.Module, total: Callable[[Tensor], Tensor], updated: Tensor) -> None:
        """Move each layer's bias towards even counts of the step's tokens, over all ranks; not if it was skipped."""
        routers = [router for router in module.modules() if isinstance(router, Router)]
        if not routers:
            return
        counts = total(torch.stack([router.counts for router in routers]))
        for router, own in zip(routers, counts, strict=True):
            router.end_step(own, updated)
            if router.bias is not None:
                move = self.config.balance_rate * torch.sign(own.float().mean() - own)
                router.bias.add_(torch.where(updated, move, 0.0))

    def measure(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """Loads of the last step that was not skipped; entropies of such, and rows of all, since the last row."""
        found: dict[str, Tensor | None] = dict.fromkeys(self.measures)
        loads = []
        for number, layer in module.layers.items():
            if not isinstance(layer.ffn, Mixture):
                continue
            router, experts = layer.ffn.router, layer.ffn.experts
            loads.append(router.load.max() / router.load.double().mean())
            found[f"layers.{number}.expert_load"] = loads[-1]
            found[f"layers.{number}.router_entropy"] = router.entropies.clone()
            lost = router.routed - experts.computed
            found[f"layers.{number}.dropped_share"] = torch.stack([lost, router.routed])
            for counted in (router.entropies, router.routed, experts.computed):
                counted.zero_()
        if loads:
            found["expert_load"] = torch.stack(loads).max()
        return found

    def hf_config(self) -> Mapping[str, Any]:
        """A MixtralForCausalLM, or with norms of heads a Qwen3MoeForCausalLM; neither chooses with a bias."""
        c = self.config
        wanted = {"balance": ("sequence", "none"), "router": ("softmax",), "n_shared_experts": (0,)}
        wanted |= {} if c.qk_norm else {"n_dense_layers": (0,), "normalized": (True,)}
        theirs = "Qwen3MoeForCausalLM" if c.qk_norm else "MixtralForCausalLM"
        wrong = [
            ConfigIssue(
                "", f"[model] {key} = {value!r}: {theirs} of transformers has only {' or '.join(map(repr, fits))}"
            )
            for key, fits in wanted.items()
            if (value := getattr(c, key)) not in fits
        ]
        if wrong:
            raise ConfigError(wrong)
        shared = {
            **{theirs: getattr(c, ours) for theirs, ours in (_HF_SIZES | _HF_SAME).items()},
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.heads.head_dim,
            "initializer_range": c.init_std,
            "rope_theta": c.rope_theta,
            "rope_scaling": None,
            "sliding_window": None,
            "output_router_logits": False,
        }
        if c.qk_norm:
            return shared | {
                "architectures": [theirs],
                "model_type": "qwen3_moe",
                "num_experts": c.n_experts,
                "moe_intermediate_size": c.expert_dim,
                "intermediate_size": c.ffn_dim,
                "norm_topk_prob": c.normalized,
                "mlp_only_layers": list(range(c.n_dense_layers)),
                **_QWEN3_FIXED,
            }
        return shared | {
            "architectures": [theirs],
            "model_type": "mixtral",
            "num_local_experts": c.n_experts,
            "intermediate_size": c.expert_dim,
            **_MIXTRAL_FIXED,
        }

    def hf_tensors(self) -> Sequence[HfTensor]:
        """The names of both, which have a tensor for each expert."""
        c = self.config
        attention = {theirs: ours for theirs, ours in huggingface.LAYER.items() if not theirs.startswith("mlp.")}
        norms = {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"} if c.qk_norm else {}
        tensors = list(huggingface.decoder_tensors(c.n_layers, attention | norms, tied=c.tied))
        mlp, names = _QWEN3_NAMES if c.qk_norm else _MIXTRAL_NAMES
        for i in range(c.n_layers):
            there, here = f"model.layers.{i}.{mlp}", f"layers.{i}.ffn"
            pairs = tuple(zip(names, ("w1", "w2", "w3"), strict=True))
            if i < c.n_dense_layers:
                tensors += [HfTensor(f"{there}.{theirs}.weight", (f"{here}.{ours}.weight",)) for theirs, ours in pairs]
                continue
            tensors.append(HfTensor(f"{there}.gate.weight", (f"{here}.router.weight",)))
            tensors += [
                HfTensor(f"{there}.experts.{e}.{theirs}.weight", (f"{here}.experts.{ours}.weight",), element=e)
                for theirs, ours in pairs
                for e in range(c.n_experts)
            ]
        return tensors

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        qwen3 = config.get("model_type") == "qwen3_moe"
        if not qwen3 and config.get("model_type") != "mixtral":
            return None
        also = {"num_local_experts": "num_experts"} if qwen3 else {"num_experts": "num_local_experts"}
        config = huggingface.with_defaults(config, _QWEN3_DEFAULTS if qwen3 else _MIXTRAL_DEFAULTS, **also)
        theta, _, wrong = huggingface.read_rope(config, {"default": ()}, theta=1e4 if qwen3 else 1e6)
        keys = dict(_HF_SIZES)
        if qwen3:
            keys |= {"num_experts": "n_experts", "moe_intermediate_size": "expert_dim"}
            keys |= {"intermediate_size": "ffn_dim"} if config["mlp_only_layers"] else {}
        else:
            keys |= {"num_local_experts": "n_experts", "intermediate_size": "expert_dim"}
        issues = [*huggingface.size_issues(config, keys), *wrong]
        issues += huggingface.fixed_issues(config, _QWEN3_FIXED if qwen3 else _MIXTRAL_FIXED)
        dense = (config["mlp_only_layers"] if qwen3 else None) or []
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            issues.append(huggingface.issue(f"mlp_only_layers = {dense!r}: this model's dense layers are its first"))
        if issues:
            raise ConfigError(issues)
        return {ours: config[theirs] for theirs, ours in (keys | _HF_SAME).items()} | {
            "n_kv_heads": config["num_key_value_heads"] or config["num_attention_heads"],
            "head_dim": config["head_dim"] or config["hidden_size"] // config["num_attention_heads"],
            "rope_theta": theta,
            "qk_norm": qwen3,
            "n_dense_layers": len(dense),
            "balance": "none",
            "normalized": config["norm_topk_prob"] if qwen3 else True,
        }


_HF_SIZES: Mapping[str, str] = {
    **{theirs: ours for theirs, ours in huggingface.SIZES.items() if theirs != "intermediate_size"},
    "num_experts_per_tok": "top_k",
}
_HF_SAME = {"tie_word_embeddings": "tied", "rms_norm_eps": "norm_eps"}
_MIXTRAL_NAMES = "block_sparse_moe", ("w1", "w2", "w3")
_QWEN3_NAMES = "mlp", ("gate_proj", "down_proj", "up_proj")
_MIXTRAL_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN3_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_MIXTRAL_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0}
_QWEN3_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
}
