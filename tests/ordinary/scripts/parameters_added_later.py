"""A head is added at the fourth step, with a group of parameters in the optimizer."""

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    head = None
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            if step.number == 4:
                head = torch.nn.Linear(1, 1)
                optimizer.add_param_group({"params": head.parameters(), "lr": 1e-3})
            data, target = batch.data
            output = model(data) if head is None else head(model(data))
            batch.scale(mse_loss(output, target)).backward()
            if head is not None:
                for p in head.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= run.world_size
            optimizer.step()
            optimizer.zero_grad()
