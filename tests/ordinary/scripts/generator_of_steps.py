"""A generator function around the steps."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def batches(run, loader):
    for step in run.steps(loader, until=12):
        with step as batch:
            yield batch


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for batch in batches(run, run.loader(dataset, global_batch=12)):
        data, target = batch.data
        batch.scale(mse_loss(model(data), target)).backward()
        optimizer.step()
        optimizer.zero_grad()
