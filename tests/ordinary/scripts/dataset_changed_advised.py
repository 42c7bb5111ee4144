"""The same curriculum with the line applied that the refusal says."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep


class Waves(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(96, 8)
        self.carried = {"scale": 1.0}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] * self.carried["scale"], self.x[i].sum(0, keepdim=True)


torch.manual_seed(0)
dataset = Waves()

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer, dataset_carried=dataset.carried)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            if step.number == 3:
                dataset.carried["scale"] = 2.0
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
