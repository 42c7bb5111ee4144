"""Leaves the loop when the loss has not become better for some steps, by an object."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Patience:
    def __init__(self):
        self.best, self.waited = float("inf"), 0

    def update(self, value):
        if value < 0.5 * self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    @property
    def over(self):
        return self.waited >= 9


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    patience = Patience()
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            loss = mse_loss(model(data), target)
            batch.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            patience.update(float(mean))
        if patience.over:
            break
