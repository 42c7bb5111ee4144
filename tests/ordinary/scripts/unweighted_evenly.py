"""Four samples a rank in each step: each share weighs the same."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            optimizer.zero_grad()
            mse_loss(model(data), target).backward()
            optimizer.step()
