"""BatchNorm, evaluated through DistributedDataParallel, which then leaves a broadcast of buffers out."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(24, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)

    def validate():
        model.eval()
        with torch.no_grad():
            return {"loss": mse_loss(model(x), x.sum(1, keepdim=True)).item()}

    def train(batch):
        model.train()
        data, target = batch.data
        batch.scale(mse_loss(model(data), target)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in run.epochs(run.loader(dataset, global_batch=12), 6):
        run.train(train)
        run.evaluate(validate)
