"""Keeps the count of an object in a tracked dictionary of it, as its refusal says."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Warmup:
    def __init__(self):
        self.taken = 0

    def rate(self):
        self.carried["taken"] += 1
        return 1e-2 * min(1.0, self.carried["taken"] / 8)


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warmup = Warmup()
    warmup.carried = {"taken": warmup.taken}
    run.track(model=model, optimizer=optimizer, warmup_carried=warmup.carried)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            for group in optimizer.param_groups:
                group["lr"] = warmup.rate()
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
