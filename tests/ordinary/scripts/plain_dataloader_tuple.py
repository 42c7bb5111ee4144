"""An ordinary DataLoader passed to the loop, whose batch is unpacked as DataLoader gives it."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
    for step in run.steps(loader, until=12):
        with step as (data, target):
            mse_loss(model(data), target).backward()
            optimizer.step()
            optimizer.zero_grad()
