"""Two heads that are trained in turn, with decay, and gradients that are cleared in place: an idle head decays too."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 16)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(16, 1), torch.nn.Linear(16, 1)])

    def forward(self, x, task):
        return self.heads[task](self.body(x).relu())


torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=1) as run:
    model = DDP(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            task = (step.number // 3) % 2
            optimizer.zero_grad(set_to_none=False)
            batch.scale(mse_loss(model(data, task), target)).backward()
            optimizer.step()
