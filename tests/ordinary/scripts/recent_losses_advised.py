"""Keeps the last losses in a tracked list, as the refusal of a deque says."""

import collections

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
    carried = {"recent": list(collections.deque(maxlen=3))}
    run.track(model=model, optimizer=optimizer, carried=carried)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            loss = mse_loss(model(data), target)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            carried["recent"].append(mean.item())
            del carried["recent"][:-3]
            batch.scale(loss / (sum(carried["recent"]) / len(carried["recent"]))).backward()
            optimizer.step()
            optimizer.zero_grad()
