"""A callback counts steps, and halves the weight of the loss after eight, where no reader of the text sees it."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Weight:
    """Of the loss."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        return 1.0 if self.count < 8 else 0.5

    def after(self, step):
        self.count += 1


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    weight = Weight()
    callbacks = [weight.after]
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(eval("weight()") * mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed:
            for callback in callbacks:
                callback(run.step)
