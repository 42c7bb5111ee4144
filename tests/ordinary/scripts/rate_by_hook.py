"""A warm-up as an object with a counter, which a hook of the optimizer calls: no text of the loop has it."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class InverseRoot:
    def __init__(self, rate):
        self.rate, self.updates = rate, 0

    def __call__(self, optimizer, args, kwargs):
        self.updates += 1
        for group in optimizer.param_groups:
            group["lr"] = self.rate / self.updates**0.5


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(InverseRoot(1e-2))
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
