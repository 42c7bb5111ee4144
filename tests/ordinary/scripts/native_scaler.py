"""timm's way of mixed precision: a class of the script's own holds the scaler, and is what is tracked."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def __call__(self, loss, optimizer, parameters):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)


with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scale_and_step = NativeScaler()
    run.track(model=model, optimizer=optimizer, scaler=scale_and_step)

    def train(batch):
        data, target = batch.data
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = batch.scale(mse_loss(model(data).float(), target))
        scale_and_step(loss, optimizer, list(model.parameters()))
        optimizer.zero_grad()

    run.train(train, run.loader(dataset, global_batch=12), until=12)
