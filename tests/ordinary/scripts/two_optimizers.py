"""One optimizer for the weights and one for the biases, each with its schedule."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    weights = torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1], lr=1e-2)
    biases = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=1e-2, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.StepLR(weights, 3), torch.optim.lr_scheduler.StepLR(biases, 5)]
    run.track(model=model, weights=weights, biases=biases, schedule0=schedules[0], schedule1=schedules[1])
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            weights.step()
            biases.step()
            model.zero_grad()
            for schedule in schedules:
                schedule.step()
