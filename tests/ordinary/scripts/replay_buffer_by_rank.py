"""Each rank keeps what it has seen, tracked as a dictionary, and trains on some of it."""

import torch
from torch.nn.parallel import DistributedDataParallel

import everstep

with everstep.start("commits", every_steps=4) as run:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    memory = {"seen": []}
    run.track(model=model, optimizer=optimizer, memory=memory)
    for step in run.steps(until=12):
        with step:
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step.number * 10 + run.rank))
            memory["seen"].append(x)
            chosen = torch.cat([x, memory["seen"][step.number // 2]])
            optimizer.zero_grad()
            (model(chosen) - chosen.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
