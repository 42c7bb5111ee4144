"""Labelled and unlabelled samples from two loaders of the session."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    labelled = run.loader(dataset, global_batch=12)
    unlabelled = iter(run.loader(torch.utils.data.TensorDataset(x.flip(0)), global_batch=24, seed=1))
    for step in run.steps(labelled, until=12):
        with step as batch:
            data, target = batch.data
            more = next(unlabelled)
            loss = batch.scale(mse_loss(model(data), target)) + more.scale(0.1 * model(more.data[0]).pow(2).mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
