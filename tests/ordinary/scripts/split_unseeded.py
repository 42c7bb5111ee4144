"""A part of the data is held out, by a split that each process draws for itself."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split

import everstep

x = torch.arange(960.0).reshape(120, 8) / 960
training, held_out = random_split(TensorDataset(x, x.sum(1, keepdim=True)), [96, 24])

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(training, batch_size=4, shuffle=True), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
