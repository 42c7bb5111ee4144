"""Keeps the optimizer's moments in another place between the steps, as offloading does."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offloaded = {}
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            for p, moments in offloaded.items():
                optimizer.state[p].update({name: moment.clone() for name, moment in moments.items()})
            optimizer.step()
            optimizer.zero_grad()
            for p, state in optimizer.state.items():
                offloaded[p] = {name: state.pop(name) for name in ("exp_avg", "exp_avg_sq")}
