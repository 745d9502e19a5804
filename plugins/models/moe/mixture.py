"""A mixture's options and modules: the router, the experts behind it, and what keeps these equally busy."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts import option
from titan.layers.blocks import Heads, SwiGLU
from titan.layers.decoder import DecoderConfig
from titan.layers.experts import Experts, SideLoss, is_recomputed, rows_per_expert
from titan.layers.philox import Jitter


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(DecoderConfig):
    """Sizes of a mixture of experts; the defaults are the preset `moe-tiny`."""

    n_experts: int = option(8, "experts per layer", at_least=1, at_most=2**16)
    top_k: int = option(2, "experts per token", at_least=1, at_most=2**10)
    n_shared_experts: int = option(0, "experts that every token passes", at_least=0, at_most=2**10)
    expert_dim: int = option(192, "hidden size of an expert", at_least=1, at_most=2**24)
    n_dense_layers: int = option(0, "first layers that have one feed-forward in place of experts", at_least=0)
    ffn_dim: int = option(384, "hidden size of the feed-forward of dense layers", at_least=1, at_most=2**24)
    router: Literal["softmax", "sigmoid"] = option("softmax", "how the router scores experts")
    normalized: bool = option(True, "divide the weights of a token's experts by their sum")
    balance: Literal["bias", "sequence", "none"] = option(
        "bias", "what keeps experts equally busy: a bias of the choice, a loss per sequence, or nothing"
    )
    balance_rate: float = option(1e-3, "step of the bias, or weight of the loss", at_least=0)
    router_jitter: float = option(
        0.0, "in training, what the router sees is multiplied by random numbers within this of 1", at_least=0, at_most=1
    )
    head_dim: int | None = option(None, "features per head; unset: dim / n_heads", at_least=1, at_most=2**16)
    qk_norm: bool = option(False, "RMSNorm of each head's queries and keys")
    rope_theta: float = option(1e6, "base of the rotary frequencies", above=1)

    @property
    def heads(self) -> Heads:
        """The attention of a layer."""
        return self.heads_with(self.head_dim, norm_eps=self.norm_eps if self.qk_norm else None, rotary=True)


class Router(nn.Module):
    """Chooses experts for each token, and counts what it has chosen; padding is routed, but not counted.

    bias [E]: added to scores for the choice.  counts [E]: tokens per expert since the step began.  entropy [2]: the sum
    of the tokens' entropies since then, and their number.  entropies [2]: the same since the last row of metrics, of
    steps that were not skipped.  routed: rows chosen since that row, those of padding too.  load [E]: tokens per expert
    of the last step that was not skipped, over all ranks.
    """

    weight: nn.Parameter
    bias: Tensor | None
    counts: Tensor
    entropy: Tensor
    entropies: Tensor
    routed: Tensor

    def __init__(self, c: MixtureConfig) -> None:
        super().__init__()
        self.top_k, self.kind, self.normalized = c.top_k, c.router, c.normalized
        self.weight = nn.Parameter(torch.empty(c.n_experts, c.dim))
        self.register_buffer("bias", torch.zeros(c.n_experts) if c.balance == "bias" else None)
        self.register_buffer("counts", torch.zeros(c.n_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("entropy", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.register_buffer("entropies", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.register_buffer("routed", torch.zeros((), dtype=torch.float64), persistent=False)
        self.load: Tensor | None = None

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D] -> chosen experts [T, k], their weights [T, k], and scores that add up to 1 [T, E], in float32.

        real: [T] bool, false at padding; None: nothing is padding.
        """
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.kind == "softmax" else logits.sigmoid()
        chosen = (scores if self.bias is None else scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        shares = scores if self.kind == "softmax" else scores / scores.sum(-1, keepdim=True)
        if self.training and not is_recomputed():
            with torch.no_grad():
                self.counts.add_(rows_per_expert(chosen, len(self.counts), real))
                nats = torch.special.entr(shares)
                nats = (nats if real is None else torch.where(real[:, None], nats, 0.0)).sum()
                tokens = torch.full_like(nats, x.shape[0]) if real is None else real.sum().to(nats.dtype)
                self.entropy.add_(torch.stack([nats, tokens]))
                self.routed.add_(chosen.numel())
        return chosen, weights, shares

    def end_step(self, counts: Tensor, updated: Tensor) -> None:
        """Begin anew to count. counts [E]: of all ranks.  updated: a bool scalar; of a skipped step nothing stays."""
        self.load = counts if self.load is None else torch.where(updated, counts, self.load)
        self.entropies.add_(torch.where(updated, self.entropy, 0.0))
        self.counts.zero_()
        self.entropy.zero_()


class Mixture(nn.Module):
    """Experts behind a router, beside those that every token passes; [B, S, D] to [B, S, D]."""

    def __init__(self, c: MixtureConfig) -> None:
        super().__init__()
        self.jitter = Jitter(c.dim, c.router_jitter) if c.router_jitter else None
        self.router = Router(c)
        self.experts = Experts(c.n_experts, c.dim, c.expert_dim)
        self.shared = SwiGLU(c.dim, c.n_shared_experts * c.expert_dim) if c.n_shared_experts else None
        self.balance = SideLoss() if c.balance == "sequence" else None
        self.balance_rate = c.balance_rate

    def forward(
        self, x: Tensor, seeds: Tensor | None = None, positions: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        """[B, S, D] -> [B, S, D]; with jitter also the seeds [B] and positions [B, S].

        real: [B, S] bool, false at padding; None: nothing is padding.
        """
        seen = x if self.jitter is None else self.jitter(x, seeds, positions)
        chosen, weights, shares = self.router(seen.flatten(0, 1), None if real is None else real.flatten())
        if self.balance is not None and self.training:
            imbalance = imbalance_of(*(each.unflatten(0, x.shape[:2]) for each in (chosen, shares)), real)
            weights = self.balance(weights, self.balance_rate * imbalance)
        y = self.experts(x.flatten(0, 1), chosen, weights).view_as(x)
        return y if self.shared is None else y + self.shared(x)


def imbalance_of(chosen: Tensor, shares: Tensor, real: Tensor | None = None) -> Tensor:
    """Sum over sequences of sum_e f_e P_e, 1 for each where its tokens are spread evenly (arXiv 2412.19437, eq. 17).

    chosen: [B, S, k].  shares: [B, S, E].  real: [B, S] bool, false at padding, of which f and P take no part.
    """
    stack = shares.shape[-1]
    masks = [None] * len(chosen) if real is None else real.unbind()
    f = torch.stack([rows_per_expert(each, stack, mask) for each, mask in zip(chosen.unbind(), masks, strict=True)])
    if real is None:
        tokens, means = chosen.shape[1], shares.mean(1)
    else:
        tokens = real.sum(1, keepdim=True).clamp(min=1)
        means = torch.where(real[..., None], shares, 0.0).sum(1) / tokens
    return (f * (stack / (chosen.shape[-1] * tokens)) * means).sum()
