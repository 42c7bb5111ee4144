"""A centre that the loss depends on: tracked in a dictionary, and used by its own name."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    center = torch.zeros(1)
    run.track(model=model, optimizer=optimizer, state={"center": center})
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            found = model(data)
            batch.scale(mse_loss(found - center, target)).backward()
            mean = found.detach().mean(0)
            dist.all_reduce(mean)
            optimizer.step()
            optimizer.zero_grad()
            center.lerp_(mean / run.world_size, 0.1)
