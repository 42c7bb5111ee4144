"""The steps are taken in parts, each with a rate of its own, by `islice`."""

from itertools import islice

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
    run.track(model=model, optimizer=optimizer)
    steps = run.steps(run.loader(dataset, global_batch=12), until=12)
    for part in range(4):
        for group in optimizer.param_groups:
            group["lr"] = (2e-2, 1e-2, 1e-3, 1e-4)[part]
        for step in islice(steps, 4):
            with step as batch:
                data, target = batch.data
                batch.scale(mse_loss(model(data), target)).backward()
                optimizer.step()
                optimizer.zero_grad()
