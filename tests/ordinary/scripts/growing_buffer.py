"""A buffer that forward replaces by a longer one."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Remembering(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.register_buffer("means", torch.zeros(0))

    def forward(self, data):
        if self.training:
            self.means = torch.cat([self.means, torch.full((1,), 12.0)])
        return self.linear(data) + 0 * self.means.sum()


with everstep.start("commits", every_steps=4) as run:
    model = DDP(Remembering(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
