"""The data set begins to add noise when the trainer tells it to."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)


class Noisy(torch.utils.data.Dataset):
    """Numbers, and their sums."""

    strength = 0.0

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return x[index] + self.strength, x[index].sum().reshape(1)


dataset = Noisy()

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed and run.step == 4:
            type(dataset).strength = 0.5
