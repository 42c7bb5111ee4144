import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import everstep

STAGES, WIDTH, HIDDEN = 2, 8, 16

g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, WIDTH, generator=g), torch.randint(0, 3, (96,), generator=g))
with everstep.start("commits", every_steps=4) as run:
    replica = run.mesh(model=STAGES).get_group("model")
    number = dist.get_rank(replica)
    torch.manual_seed(number)
    if number == 0:
        stage = torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU()).to(run.device)
        optimizers = {"optimizer": torch.optim.AdamW(stage.parameters(), lr=0.01)}
    else:
        stage = torch.nn.Sequential(torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, 3)).to(run.device)
        optimizers = {
            "norm_optimizer": torch.optim.SGD(stage[0].parameters(), lr=0.01, momentum=0.9),
            "optimizer": torch.optim.AdamW(stage[1].parameters(), lr=0.01),
        }
    run.track(model=stage, **optimizers)
    for step in run.steps(run.loader(data, global_batch=9), until=12):
        with step as batch:
            x, y = batch.to(run.device).data
            if number == 0:
                assert batch.weight > 0  # the gradients that come back are weighted
                output = stage(x)
                dist.send(output.detach(), group=replica, group_dst=1)
                gradient = torch.empty_like(output)
                dist.recv(gradient, group=replica, group_src=1)
                output.backward(gradient)
            else:
                hidden = torch.empty(len(x), HIDDEN)
                dist.recv(hidden, group=replica, group_src=0)
                batch.scale(torch.nn.functional.cross_entropy(stage(hidden.requires_grad_()), y)).backward()
                dist.send(hidden.grad, group=replica, group_dst=0)
            run.average_gradients(stage)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
