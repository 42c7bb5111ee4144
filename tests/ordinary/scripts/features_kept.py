"""Keeps what a frozen teacher makes of each sample, by its index."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(36, 8), torch.arange(36))
teacher = torch.nn.Linear(8, 1).eval().requires_grad_(False)

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    features = {}
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, indices = batch.data
            for sample, idx in zip(data, indices.tolist(), strict=True):
                if idx not in features:
                    features[idx] = teacher(sample)
            target = torch.stack([features[idx] for idx in indices.tolist()])
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
