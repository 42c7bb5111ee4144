"""An evaluation with averaged weights, copied in and back through `.data`, as diffusers' EMAModel does."""

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
    average = [p.detach().clone() for p in model.parameters()]
    run.track(model=model, optimizer=optimizer, average=average)

    def evaluate():
        kept = [p.detach().clone() for p in model.parameters()]
        for p, a in zip(model.parameters(), average, strict=True):
            p.data.copy_(a)
        with torch.no_grad():
            loss = mse_loss(model.module(x), x.sum(1, keepdim=True))
        dist.all_reduce(loss)
        for p, k in zip(model.parameters(), kept, strict=True):
            p.data.copy_(k)
        return {"loss": loss}

    run.evaluate(evaluate, every=3)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p, a in zip(model.parameters(), average, strict=True):
                    a.lerp_(p, 0.1)
