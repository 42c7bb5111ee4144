"""A function takes the step, and returns its loss from within the block."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def learn(step, model, optimizer, schedule):
    """One step."""
    with step as batch:
        data, target = batch.data
        loss = mse_loss(model(data), target)
        batch.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        loss = learn(step, model, optimizer, schedule)
        if step.completed:
            print(f"step {run.step}: loss {loss.item():.3f}")
