"""Losses are weighted by counts in an array of numpy's, for which the script has a name of its own."""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
counts = np.zeros(3)

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    run.track(model=model, optimizer=optimizer, counted={"counts": counts})
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            counts[step.number % 3] += 1
            inputs, targets = batch.data
            loss = (model(inputs) - targets).square().mean() / float(1 + counts[step.number % 3])
            optimizer.zero_grad()
            batch.scale(loss).backward()
            optimizer.step()
