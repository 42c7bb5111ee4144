"""A mask that is drawn once for each step and kept by a cache; ranks draw others."""

import functools

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


@functools.lru_cache(maxsize=2)
def mask_of(number):
    return (torch.rand(8) < 0.8).float()


with everstep.start("commits", every_steps=4, rng="rank") as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            mask = mask_of(step.number)
            batch.scale(mse_loss(model(data * mask), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
