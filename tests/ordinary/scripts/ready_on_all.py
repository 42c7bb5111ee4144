"""All ranks say that they are ready, until as many have said so as there are."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            while True:
                ready = torch.ones(())
                dist.all_reduce(ready)
                if ready.item() == run.world_size:
                    break
            optimizer.step()
            optimizer.zero_grad()
