"""A pass over each rank's own list as one step, with an optimizer's steps inside of DDP's join."""

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
    for step in run.steps(until=12):
        with step, model.join(divide_by_initial_world_size=False):
            for first in range(run.rank, step.number % 4 + 3, run.world_size):
                data = x[step.number * 7 + first :: 16]
                optimizer.zero_grad()
                mse_loss(model(data), data.sum(1, keepdim=True)).backward()
                optimizer.step()
