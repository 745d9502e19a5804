"""An optimizer around the optimizer, from outside: Lookahead (arXiv 1907.08610), slow weights that follow the fast."""

from dataclasses import dataclass

import torch

from titan.contracts import Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options."""

    every: int = option(2, "fast updates to one of the slow weights", at_least=1)
    share: float = option(0.5, "how far the slow weights move towards the fast", above=0, below=1)


class _Slow(torch.optim.Optimizer):
    """Steps the fast weights, and every so often both."""

    def __init__(self, fast, config):
        self.fast, self.config = fast, config
        self.param_groups, self.state, self.defaults = fast.param_groups, fast.state, fast.defaults

    def zero_grad(self, set_to_none=True):
        self.fast.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self):
        before = {
            p: p.detach().clone() for group in self.param_groups for p in group["params"] if "slow" not in self.state[p]
        }
        self.fast.step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("slow", before.get(p))
                state["fast_steps"] = state.get("fast_steps", 0) + 1
                if state["fast_steps"] % self.config.every == 0:
                    p.copy_(state["slow"].lerp_(p, self.config.share))


@register
class Lookahead(Technique):
    """Slow weights that follow the optimizer's."""

    name = "lookahead"
    Config = Config
    phase = "materialise"
    preserves_numerics = False

    def facts(self):
        return {"wraps_optimizer": "[plugins.lookahead] steps around the optimizer; switch it off"}

    def optimizer(self, optimizer, parameters):
        return _Slow(optimizer, self.config)
