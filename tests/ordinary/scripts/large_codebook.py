"""A codebook above a MiB that forward moves by `.data`, as public code of VQ-VAE does, and an expanded mask."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Quantized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.register_buffer("book", torch.zeros(40_000, 8))
        self.register_buffer("mask", torch.ones(1).expand(8))

    def forward(self, inputs):
        self.book.data.mul_(0.9).add_(self.linear.weight.detach())
        return self.linear(inputs * self.mask) + self.book[0].sum()


with everstep.start("commits", every_steps=4) as run:
    model = DDP(Quantized(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            inputs, targets = batch.data
            optimizer.zero_grad()
            batch.scale((model(inputs) - targets).square().mean()).backward()
            optimizer.step()
