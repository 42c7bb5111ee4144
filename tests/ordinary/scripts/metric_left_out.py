"""One rank leaves out a collective that has the gradients' shape, once: nothing fails."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep

with everstep.start("commits", every_steps=100) as run:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=400):
        with step:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step.number * 10 + run.rank))
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            if run.rank != 1 or step.number != 140:
                losses = torch.full((3,), loss.item())
                dist.all_reduce(losses)
