import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import everstep

STAGES, WIDTH, WORDS = 4, 6, 11


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(5)) * 0.1)


g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randint(0, WORDS, (96, 3), generator=g), torch.randint(0, WORDS, (96,), generator=g))
with everstep.start("commits", every_steps=4) as run:
    run.mesh(model=STAGES)
    replica, ends = None, None
    for one in range(0, run.world_size, STAGES):
        group, both = dist.new_group(list(range(one, one + STAGES))), dist.new_group([one, one + STAGES - 1])
        replica = group if group is not dist.GroupMember.NON_GROUP_MEMBER else replica
        ends = both if both is not dist.GroupMember.NON_GROUP_MEMBER else ends
    number = dist.get_rank(replica)
    torch.manual_seed(number)
    first, last = number == 0, number == STAGES - 1
    model = torch.nn.ModuleDict({"body": torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1))})
    if first or last:
        model["words"] = Words()  # tied: both ends have the same, and the sum of both gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    run.track(model=model, optimizer=optimizer, average=average)

    def forward(x):
        if first:
            received = None
            hidden = torch.nn.functional.embedding(x, model["words"].weight).mean(1)
        else:
            received = hidden = torch.empty(len(x), WIDTH)
            dist.recv(received, run.rank - 1)
            received.requires_grad_()
        output = model["body"](hidden)
        if not last:
            dist.send(output.detach(), run.rank + 1)
        return received, output

    def loss_of(output, y):
        return torch.nn.functional.cross_entropy(output @ model["words"].weight.T, y)

    def evaluate():
        model.eval()
        loss = torch.zeros(())
        with torch.no_grad():
            x, y = data[:8]
            _, output = forward(x)
            if last:
                loss = loss_of(output, y)
        dist.broadcast(loss, group=replica, group_src=STAGES - 1)
        return {"loss": loss}

    run.evaluate(evaluate, every=4)
    for step in run.steps(run.loader(data, global_batch=9, micro_batch=3), until=12):
        with step as batches:
            for batch in batches:
                x, y = batch.data
                received, output = forward(x)
                if last:
                    batch.scale(loss_of(output, y)).backward()
                else:
                    assert batch.weight > 0  # the gradients that come back are weighted
                    gradient = torch.empty_like(output)
                    dist.recv(gradient, run.rank + 1)
                    output.backward(gradient)
                if not first:
                    dist.send(received.grad, run.rank - 1)
            if first or last:
                dist.all_reduce(model["words"].weight.grad, group=ends)
            run.average_gradients(model)
            squares = sum(p.grad.square().sum() for p in (model if not last else model["body"]).parameters())
            dist.all_reduce(squares, group=replica)
            for p in model.parameters():
                p.grad *= (0.5 / squares.sqrt()).clamp(max=1.0)
            optimizer.step()
            average.update_parameters(model)
            optimizer.zero_grad()
