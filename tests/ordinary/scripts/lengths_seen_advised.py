"""Keeps in a tracked dictionary what it has seen, as the refusal of a set says."""

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
    seen = set()
    carried = {"seen": dict.fromkeys(seen)}
    run.track(model=model, optimizer=optimizer, carried=carried)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            carried["seen"][step.number % 5] = None
            batch.scale(mse_loss(model(data), target) / len(carried["seen"])).backward()
            optimizer.step()
            optimizer.zero_grad()
