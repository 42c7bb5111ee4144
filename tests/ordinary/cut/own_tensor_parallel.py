import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import everstep

PARTS, WIDTH, HIDDEN = 2, 8, 16


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Block(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, self.part = group, dist.get_rank(group)
        self.norm = torch.nn.LayerNorm(WIDTH)
        up, down = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up = torch.nn.Parameter(up.weight.detach().chunk(PARTS)[self.part].clone())
        self.down = torch.nn.Parameter(down.weight.detach().chunk(PARTS, 1)[self.part].clone())
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        hidden = torch.relu(Enter.apply(self.norm(x), self.group) @ self.up.T)
        return x + self.drop(Leave.apply(hidden @ self.down.T, self.group))


g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, WIDTH, generator=g), torch.randint(0, 3, (96,), generator=g))
with everstep.start("commits", every_steps=4) as run:
    run.mesh(model=PARTS)
    mine, replicas = None, None
    for first in range(0, run.world_size, PARTS):
        group = dist.new_group(list(range(first, first + PARTS)))
        mine = group if group is not dist.GroupMember.NON_GROUP_MEMBER else mine
    for part in range(PARTS):
        group = dist.new_group(list(range(part, run.world_size, PARTS)))
        replicas = group if group is not dist.GroupMember.NON_GROUP_MEMBER else replicas
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), Block(mine), Block(mine), torch.nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.to(run.device).parameters(), lr=0.01)
    seen = {"loss": 0.0}
    run.track(model=model, optimizer=optimizer, seen=seen)
    for step in run.steps(run.loader(data, global_batch=9), until=12):
        with step as batch:
            x, y = batch.to(run.device).data
            loss = batch.scale(torch.nn.functional.cross_entropy(model(x), y))
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=replicas)
                p.grad /= run.world_size // PARTS
            total = loss.detach().clone()
            dist.all_reduce(total, group=replicas)
            optimizer.step()
            optimizer.zero_grad()
            seen["loss"] += total.item()
