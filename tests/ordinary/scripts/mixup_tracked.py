"""Mixup, with one coefficient for all ranks from a tracked torch generator."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Coefficients:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self):
        return float(torch.rand((), generator=self.generator))

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    coefficients = Coefficients()
    run.track(model=model, optimizer=optimizer, coefficients=coefficients)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            part = coefficients()
            data, target = part * data + (1 - part) * data.flip(0), part * target + (1 - part) * target.flip(0)
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
