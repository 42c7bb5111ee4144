"""A communication hook of DDP that compresses gradients, and its state.

With error feedback each rank has a rest of its own. A commit, and a process that comes later, can only have what is the
same on all ranks. So every `every` steps the ranks average their rests, which changes nothing about their sum, and that
average is the state. A commit made in such a step holds all of it. A process that replaces a lost one begins with the
average of at most `every` steps ago.
"""

from typing import Any

import torch
import torch.distributed as dist
from hooks import FEEDBACK, METHODS, low_rank, summed
from torch import Tensor, nn


class Compression:
    """`register_comm_hook(compression, hook)`; before the optimizer's step `meet()`, and behind it `step()`."""

    def __init__(self, module: nn.Module, method: str, every: int = 24, rank: int = 2) -> None:
        self.method, self.every = method, every
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.steps = 0
        self.average: dict[str, Tensor] = {}  # of the rests, when they were averaged last
        self.rests: dict[str, Tensor] = {}  # this rank's
        self.q: dict[str, Tensor] = {}
        for number, (name, p) in enumerate(module.named_parameters()):
            if method in FEEDBACK:
                self.average[name] = torch.zeros_like(p, requires_grad=False)
            if method == "powersgd" and p.ndim == 2:
                q = torch.randn(p.shape[1], rank, generator=torch.Generator().manual_seed(number))
                self.q[name] = q.to(p.device)
        self.next_rests: dict[str, Tensor] = {}
        self.next_q: dict[str, Tensor] = {}

    def rest(self, name: str) -> Tensor:
        return self.rests.get(name, self.average[name])

    def averaged(self, given: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """The average and this rank's part, of each parameter. Those of a bucket are one vector, but for PowerSGD."""
        if self.method == "powersgd":
            found = {}
            for name, x in given.items():
                if name in self.q:
                    average, mine, self.next_q[name] = low_rank(x, self.q[name])
                    found[name] = average, mine
                else:
                    found[name] = summed(x.clone()) / dist.get_world_size(), x
            return found
        vector, mine = METHODS[self.method](torch.cat([x.flatten() for x in given.values()]), self.steps)
        sizes = [x.numel() for x in given.values()]
        parts = zip(given, vector.split(sizes), mine.split(sizes), strict=True)
        return {name: (a.view_as(given[name]), m.view_as(given[name])) for name, a, m in parts}

    def meet(self) -> None:
        """Average the rests in every `every`-th step. All ranks call it, behind the backward pass."""
        if self.average and (self.steps + 1) % self.every == 0:
            for name, rest in sorted(self.next_rests.items()):
                self.next_rests[name] = summed(rest) / dist.get_world_size()

    def step(self) -> None:
        """The step counts."""
        self.steps += 1
        self.rests, self.q = dict(self.next_rests), self.q | self.next_q
        if self.average and self.steps % self.every == 0:
            self.average |= {name: rest.clone() for name, rest in self.rests.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": self.average, "q": self.q}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["steps"] != self.steps:
            self.rests = {}  # of other steps
        self.steps, self.average, self.q = state["steps"], dict(state["average"]), dict(state["q"])


def hook(state: Compression, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    gradients = dict(zip((state.names[id(p)] for p in bucket.parameters()), bucket.gradients(), strict=True))
    with torch.no_grad():
        given = {name: g + state.rest(name) if state.average else g for name, g in gradients.items()}
        for name, (average, mine) in state.averaged(given).items():
            if state.average:
                state.next_rests[name] = given[name] - mine
            gradients[name].copy_(average)
    found.set_result(bucket.buffer())
    return found
