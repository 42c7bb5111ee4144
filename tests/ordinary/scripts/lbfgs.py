"""LBFGS with its closure, which runs forward and backward several times."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 1, bias=False))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data

            def closure(batch=batch, data=data, target=target):
                optimizer.zero_grad()
                loss = batch.scale(mse_loss(model(data), target))
                loss.backward()
                total = loss.detach().clone()
                dist.all_reduce(total)
                return total / run.world_size

            optimizer.step(closure)
