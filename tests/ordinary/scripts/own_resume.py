"""Loads a checkpoint of its own when it starts, and writes it on rank 0."""

import os

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if os.path.exists("last.pth"):
        saved = torch.load("last.pth")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed and run.rank == 0 and run.step % 4 == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "last.tmp")
            os.rename("last.tmp", "last.pth")
