"""Two losses, each weighted by what it was in the first step, which a tracked dictionary holds."""

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
    carried = {"first": None, "steps": 0}
    run.track(model=model, optimizer=optimizer, carried=carried)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            carried["steps"] += 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / carried["steps"]
            data, target = batch.data
            found = model(data)
            losses = torch.stack([mse_loss(found, target), found.abs().mean()])
            dist.all_reduce(mean := losses.detach().clone())
            if carried["first"] is None:
                carried["first"] = mean
            batch.scale((losses / carried["first"]).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
