"""Makes a triangle anew where the length is another than in the step before."""

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
    current, mask = 0, None
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            length = 1 + int(data[:, 0].abs().max() * 2) % 8
            if length != current:
                current = length
                mask = torch.tril(torch.ones(length, length))
            batch.scale(mse_loss(model(data) * mask.mean(), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
