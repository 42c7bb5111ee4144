import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import everstep

STAGES, WIDTH, HIDDEN, PARTS = 2, 8, 16, 3


def first(width, hidden):
    return torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Dropout(0.1))


def last(hidden):
    return torch.nn.Sequential(torch.nn.LayerNorm(hidden), torch.nn.Linear(hidden, 3))


def move(*ops):
    for work in dist.batch_isend_irecv(list(ops)):
        work.wait()


def forward_of_first(stage, x, group):
    outputs = []
    for part in x.chunk(PARTS):
        outputs.append(stage(part))
        move(dist.P2POp(dist.isend, outputs[-1].detach(), group=group, group_peer=1))
    return outputs


def backward_of_first(outputs, group):
    for output in outputs:
        gradient = torch.empty_like(output)
        move(dist.P2POp(dist.irecv, gradient, group=group, group_peer=1))
        output.backward(gradient)


def both_of_last(stage, x, y, batch, group):
    inputs, total = [], torch.zeros(())
    for part in x.chunk(PARTS):
        inputs.append(torch.empty(len(part), HIDDEN))
        move(dist.P2POp(dist.irecv, inputs[-1], group=group, group_peer=0))
    losses = []
    for hidden, part in zip(inputs, y.chunk(PARTS), strict=True):
        loss = torch.nn.functional.cross_entropy(stage(hidden.requires_grad_()), part, reduction="sum") / len(y)
        losses.append(batch.scale(loss))
        losses[-1].backward()
        total += losses[-1].detach()
    for hidden in inputs:
        dist.send(hidden.grad, group=group, group_dst=0)
    return total


g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, WIDTH, generator=g), torch.randint(0, 3, (96,), generator=g))
with everstep.start("commits", every_steps=4) as run:
    mesh = run.mesh(model=STAGES)
    replica, _ = dist.new_subgroups(STAGES)
    number = dist.get_rank(replica)
    torch.manual_seed(number)
    stage = first(WIDTH, HIDDEN) if number == 0 else last(HIDDEN)
    optimizer = torch.optim.AdamW(stage.to(run.device).parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    seen = {"loss": 0.0}
    run.track(model=stage, optimizer=optimizer, schedule=schedule, seen=seen)
    for step in run.steps(run.loader(data, global_batch=9), until=12):
        with step as batch:
            x, y = batch.to(run.device).data
            total = torch.zeros(())
            if number == 0:
                assert batch.weight > 0  # the gradients that come back are weighted
                backward_of_first(forward_of_first(stage, x, replica), replica)
            else:
                total = both_of_last(stage, x, y, batch, replica)
            run.average_gradients(stage)
            dist.all_reduce(total, group=mesh.get_group("replicate"))
            dist.broadcast(total, group=replica, group_src=1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen["loss"] += total.item()
