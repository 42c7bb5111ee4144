"""Only the first line of torchrun's script was changed: the loop is the script's own."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep

with everstep.start("commits", every_steps=2) as run:
    torch.manual_seed(0)
    x = torch.randn(36, 4)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    loader = DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, num_replicas=3, rank=0))
    for _ in range(3):
        for a, b in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
