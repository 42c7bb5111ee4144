"""A gradient penalty: the gradient of the gradient, averaged by hand."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            data = data.clone().requires_grad_()
            output = model(data)
            (gradient,) = torch.autograd.grad(output.sum(), data, create_graph=True)
            penalty = (gradient.norm(dim=1) - 1).pow(2).mean()
            batch.scale(mse_loss(output, target) + 0.1 * penalty).backward()
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= run.world_size
            optimizer.step()
            optimizer.zero_grad()
