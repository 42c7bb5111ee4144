"""Another loss from the sixth step on, set behind the block by setattr."""

import torch
from torch.nn.functional import l1_loss, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Options:
    """Of the run."""

    loss = staticmethod(mse_loss)


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(Options.loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed and run.step == 4:
            Options.loss = staticmethod(l1_loss)
