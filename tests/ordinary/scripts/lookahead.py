"""Lookahead: slow weights follow every fourth step; they are the optimizer's own, in a wrapper."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Lookahead:
    def __init__(self, optimizer, every=4, alpha=0.5):
        self.optimizer, self.every, self.alpha, self.count = optimizer, every, alpha, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for group in self.optimizer.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow.lerp_(p, self.alpha)
                p.copy_(slow)

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        self.slow, self.count = [t.clone() for t in state["slow"]], state["count"]


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lookahead = Lookahead(optimizer)
    run.track(model=model, lookahead=lookahead)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            lookahead.step()
            optimizer.zero_grad()
