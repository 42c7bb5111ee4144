"""In the style of torch.optim.swa_utils' documentation, with an average that begins later."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

import everstep

with everstep.start(URL, every_steps=EVERY) as run:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swa_model = AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05)
    track(run, model=model, optimizer=optimizer, swa_model=swa_model, scheduler=scheduler, swa_scheduler=swa_scheduler)
    for step in run.steps(until=9):
        with step:
            loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step.number >= 5:
                swa_model.update_parameters(model)
                swa_scheduler.step()
            else:
                scheduler.step()
