"""The rank is asked for once, and kept; noise is drawn by it."""

import functools

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


@functools.cache
def rank():
    """Of this process."""
    return dist.get_rank()


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            noise = torch.randn(8, generator=torch.Generator().manual_seed(1000 * step.number + rank()))
            batch.scale(mse_loss(model(data + 0.1 * noise), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
