"""Local SGD: each rank trains by itself, and every fourth step all average their weights."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.number % 4 == 3:
                with torch.no_grad():
                    for p in model.parameters():
                        dist.all_reduce(p)
                        p.div_(run.world_size)
