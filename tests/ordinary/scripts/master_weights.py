"""A bfloat16 model with float32 copies of its weights, which the optimizer steps."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1).bfloat16())
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data.bfloat16()).float(), target)).backward()
            for copy, p in zip(master, model.parameters(), strict=True):
                copy.grad = p.grad.float()
            optimizer.step()
            model.zero_grad()
            with torch.no_grad():
                for copy, p in zip(master, model.parameters(), strict=True):
                    p.copy_(copy)
