"""A DataLoader with a batch sampler of the script's own and a collate_fn."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Lengths(torch.utils.data.Sampler):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __iter__(self):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([order[i : i + 12] for i in range(0, 96, 12)])


def collate(items):
    return torch.stack([a for a, _ in items]), torch.stack([b for _, b in items])


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=Lengths(), collate_fn=collate)
    for step in run.steps(loader, until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
