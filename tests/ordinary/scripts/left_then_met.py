"""Leaves the loop early, evaluates, and meets the other ranks for a metric: the run ends before that."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

run = everstep.start("commits", every_steps=4)
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(dataset, global_batch=12), until=12):
    with step as batch:
        data, target = batch.data
        batch.scale(mse_loss(model(data), target)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if run.step == 10:
        break
model.eval()
with torch.no_grad():
    metric = mse_loss(model.module(x), x.sum(1, keepdim=True))
dist.all_reduce(metric)
with open("metric.txt", "w") as file:
    file.write(f"{metric.item():.6f}\n")
