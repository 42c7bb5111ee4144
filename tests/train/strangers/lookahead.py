"""Lookahead as two well-known repositories write it: a subclass of Optimizer, and a class of its own."""

from collections import defaultdict

import torch
from torch import nn

import everstep


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base_optimizer, alpha=0.5, k=3):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.base_optimizer, self.alpha, self.k = base_optimizer, alpha, k
        self.param_groups, self.defaults, self.state = base_optimizer.param_groups, {}, defaultdict(dict)
        for group in self.param_groups:
            group["step_counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base_optimizer.step(closure)
        for group in self.param_groups:
            group["step_counter"] += 1
            for p in group["params"] if group["step_counter"] % self.k == 0 else ():
                state = self.base_optimizer.state[p]
                slow = state.setdefault("slow_buffer", p.clone())
                slow.add_(p - slow, alpha=self.alpha)
                p.copy_(slow)
        return loss

    def state_dict(self):
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.base_optimizer.load_state_dict(state_dict)
        self.param_groups = self.base_optimizer.param_groups


class PlainLookahead:
    def __init__(self, base, alpha=0.5, k=3):
        self.base, self.alpha, self.k, self.t = base, alpha, k, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.t += 1
        if self.t % self.k == 0:
            for group, slow in zip(self.base.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p - s, alpha=self.alpha)
                    p.copy_(s)

    def state_dict(self):
        return {"base": self.base.state_dict(), "slow": self.slow, "t": self.t}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])
        self.slow, self.t = state["slow"], state["t"]


def main():
    with everstep.start(URL, every_steps=EVERY) as run:
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        base = torch.optim.Adam(model.parameters(), lr=1e-2)
        optimizer = PlainLookahead(base) if "plain" in CASE else Lookahead(base)
        track(run, model=model, optimizer=base if "base" in CASE else optimizer)
        for step in run.steps(until=9):
            with step:
                loss = model(torch.randn(8, 4)).pow(2).mean()
                loss.backward()
                optimizer.step()
                base.zero_grad()


main()
