"""The loss is divided by a number that all ranks have counted, and gathered."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            counts = torch.tensor([float((target > 0).sum())])
            dist.all_reduce(counts)
            every = [torch.zeros(1) for _ in range(run.world_size)]
            dist.all_gather(every, counts)
            loss = ((model(data) - target) ** 2).mean() * 12 / (1 + sum(every)[0])
            batch.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        print(f"step {run.step}: loss {loss.item():.3f}")
