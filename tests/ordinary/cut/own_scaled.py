import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import TensorDataset

import everstep

PARTS, WIDTH, HIDDEN = 2, 8, 16


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, WIDTH, generator=g), torch.randint(0, 3, (96,), generator=g))
with everstep.start("commits", every_steps=4) as run:
    mesh = run.mesh(model=PARTS)
    replica = mesh.get_group("model")
    part = dist.get_rank(replica)
    torch.manual_seed(part)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 3))
    optimizer = torch.optim.AdamW(model.to(run.device).parameters(), lr=0.01)
    scaler = ShardedGradScaler(run.device.type, init_scale=64.0, growth_interval=4, process_group=replica)
    run.track(model=model, optimizer=optimizer, scaler=scaler)
    for step in run.steps(run.loader(data, global_batch=9), until=12):
        with step as batch:
            x, y = batch.to(run.device).data
            loss = batch.scale(torch.nn.functional.cross_entropy(Sum.apply(model(x), replica), y))
            scaler.scale(loss).backward()
            if step.number in (3, 6) and part == 1:
                model[0].weight.grad.fill_(torch.inf)
            run.average_gradients(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
