"""In the style of the DDP tutorial: the inner module is tracked, or the wrapper, or both, or neither."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = torch.nn.Linear(10, 10)
        self.net2 = torch.nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


def demo_basic():
    with everstep.start(URL, every_steps=EVERY) as run:
        model = ToyModel().to(run.device)
        ddp_model = DDP(model)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001, momentum=0.9)
        track(run, model=model, ddp=ddp_model, optimizer=optimizer)
        for step in run.steps(until=9):
            with step:
                loss = torch.nn.functional.mse_loss(ddp_model(torch.randn(20, 10)), torch.randn(20, 5))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    demo_basic()
finally:
    dist.destroy_process_group()
