"""An ordinary DataLoader with a DistributedSampler, iterated beside the session's steps."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    batches = iter(loader)
    for step in run.steps(until=12):
        with step:
            try:
                data, target = next(batches)
            except StopIteration:
                sampler.set_epoch(1)
                batches = iter(loader)
                data, target = next(batches)
            mse_loss(model(data), target).backward()
            optimizer.step()
            optimizer.zero_grad()
