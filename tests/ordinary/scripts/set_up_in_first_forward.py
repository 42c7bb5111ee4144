"""A layer that sets its scale by the first batch of all ranks, in its first forward pass."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class ActNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(size))
        self.initialized = False

    def forward(self, data):
        if not self.initialized:
            mean = data.mean(0)
            dist.all_reduce(mean)
            with torch.no_grad():
                self.shift.copy_(-mean)
            self.initialized = True
        return data + self.shift


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(ActNorm(8), torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
