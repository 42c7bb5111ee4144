"""DDP with find_unused_parameters: every second step leaves a branch out."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)

    def forward(self, data, both):
        return self.one(data) + self.two(data) if both else self.one(data)


with everstep.start("commits", every_steps=4) as run:
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data, step.number % 2 == 0), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
