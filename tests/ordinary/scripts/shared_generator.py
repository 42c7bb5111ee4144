"""Layer drop: all ranks draw from a generator with the same seed, so that they drop the same layer."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drops = torch.Generator().manual_seed(7)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            hidden = data
            for layer in model:
                if layer is model[0] or torch.rand((), generator=drops) > 0.5:
                    hidden = hidden + torch.relu(layer(hidden))
            batch.scale(mse_loss(hidden.sum(1, keepdim=True), target)).backward()
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= run.world_size
            optimizer.step()
            optimizer.zero_grad()
