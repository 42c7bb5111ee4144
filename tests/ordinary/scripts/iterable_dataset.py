"""A stream: an IterableDataset in a DataLoader, cut by rank."""

import itertools

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __iter__(self):
        for i in itertools.count():
            if i % self.size == self.rank:
                yield dataset[i % len(dataset)]


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    stream = iter(torch.utils.data.DataLoader(Stream(run.rank, run.world_size), batch_size=4))
    for step in run.steps(until=12):
        with step:
            data, target = next(stream)
            mse_loss(model(data), target).backward()
            optimizer.step()
            optimizer.zero_grad()
