import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import everstep


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 8, generator=g), torch.randint(0, 3, (96,), generator=g))
with everstep.start("commits", every_steps=4) as run:
    mesh = run.mesh(tensor=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Block(8), Block(8), torch.nn.Linear(8, 3)).to(run.device)
    for block in model[1:3]:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(data, global_batch=9), until=12):
        with step as batch:
            x, y = batch.to(run.device).data
            batch.scale(torch.nn.functional.cross_entropy(model(x), y)).backward()
            run.average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
