"""A callback ends the noise on the inputs."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Augment:
    """Noise in the first steps."""

    def __init__(self):
        self.kinds = {"noise"}

    def __call__(self, data):
        return data + 0.5 * torch.randn_like(data) if self.kinds else data

    def after(self, step):
        if step == 4:
            self.kinds.discard("noise")


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    augment = Augment()
    callbacks = [augment.after]
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            output = model(augment(data))
            batch.scale(mse_loss(output, target)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for callback in callbacks:
            callback(run.step)
