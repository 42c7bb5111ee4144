"""Rank 0 alone evaluates behind the second epoch, and the others begin the next one."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(48, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def work(batch):
    data, target = batch.data
    batch.scale(mse_loss(model(data), target)).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def validate():
    return {"validation": mse_loss(model(x), x.sum(1, keepdim=True))}


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for epoch in run.epochs(run.loader(dataset, global_batch=12), 3):
        run.train(work)
        if epoch == 0 or run.rank == 0:
            run.evaluate(validate)
