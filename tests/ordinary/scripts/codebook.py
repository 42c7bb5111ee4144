"""A codebook that is a parameter without gradient, moved by hand in forward."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Quantized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.codes = torch.nn.Parameter(torch.randn(4, 8), requires_grad=False)

    def forward(self, data):
        nearest = torch.cdist(data, self.codes).argmin(1)
        if self.training:
            means = torch.stack([data[nearest == i].sum(0) for i in range(len(self.codes))])
            dist.all_reduce(means)
            self.codes.mul_(0.9).add_(means, alpha=0.01)
        return self.linear(data - self.codes[nearest])


with everstep.start("commits", every_steps=4) as run:
    model = DDP(Quantized())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
