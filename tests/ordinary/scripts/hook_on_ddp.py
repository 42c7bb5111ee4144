"""A hook on the model that lowers its output more from step to step."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Shrink:
    """An output, by what it has seen."""

    def __init__(self):
        self.seen = []

    def hook(self, module, inputs, output):
        self.seen.append(len(output))
        return output * 0.9 ** len(self.seen)


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    model.register_forward_hook(Shrink().hook)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
