"""An evaluation on a random part of the data; its result decides on the rate."""

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
    best = {"loss": 1e9}
    run.track(model=model, optimizer=optimizer, best=best)

    def validate():
        part = torch.randperm(96)[:8]
        with torch.no_grad():
            loss = mse_loss(model.module(x[part]), x[part].sum(1, keepdim=True))
        dist.all_reduce(loss)
        best["loss"] = loss.item()

    run.evaluate(validate, every=2)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + best["loss"])
            optimizer.step()
            optimizer.zero_grad()
