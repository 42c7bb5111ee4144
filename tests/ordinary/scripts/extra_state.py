"""A module with a running scale that is a Python number, saved as extra state."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.most = 1.0

    def forward(self, data):
        if self.training:
            self.most = 0.9 * self.most + 0.1 * 1.5
        return data / self.most

    def get_extra_state(self):
        return {"most": self.most}

    def set_extra_state(self, state):
        self.most = state["most"]


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(Scaled(), torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
