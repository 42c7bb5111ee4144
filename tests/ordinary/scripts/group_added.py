"""A layer is trained from step 5 on: its parameters become a group of the optimizer then."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    body, head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
    model = DDP(torch.nn.Sequential(body, torch.nn.ReLU(), head))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            if step.number == 5:
                optimizer.add_param_group({"params": list(body.parameters()), "lr": 1e-3})
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            model.zero_grad()
