"""MoCo's queue: a buffer with its position, moved in forward."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Queue(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.register_buffer("queue", torch.zeros(16, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, data):
        output = self.linear(data - self.queue.mean(0))
        if self.training:
            self.queue[int(self.at)] = data.detach().mean(0)
            self.at.copy_((self.at + 1) % len(self.queue))
        return output


with everstep.start("commits", every_steps=4) as run:
    model = DDP(Queue())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
