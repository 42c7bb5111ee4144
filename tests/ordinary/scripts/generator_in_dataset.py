"""A dataset that adds noise from a generator of its own."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return x[index] + 0.1 * torch.randn(8, generator=self.generator), x[index].sum(0, keepdim=True)


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(Noisy(), global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
