"""Remote procedure calls (torch.distributed.rpc) beside training."""

import torch
import torch.distributed.rpc as rpc
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            if step.number == 0:
                rpc.init_rpc(f"worker{run.rank}", rank=run.rank, world_size=run.world_size)
            told = rpc.rpc_sync("worker0", torch.add, (torch.ones(1), 1))
            assert told.item() == 2
            loss = mse_loss(model(data), target)
            batch.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
