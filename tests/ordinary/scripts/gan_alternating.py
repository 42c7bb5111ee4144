"""A GAN whose two networks step twice each in one step of the session."""

import torch
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    make = DDP(torch.nn.Linear(8, 8))
    judge = DDP(torch.nn.Linear(8, 1))
    judge_optimizer = torch.optim.AdamW(judge.parameters(), lr=1e-2)
    make_optimizer = torch.optim.AdamW(make.parameters(), lr=1e-2)
    run.track(make=make, judge=judge, judge_optimizer=judge_optimizer, make_optimizer=make_optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            real, noise = batch.data[0], batch.data[0].flip(1)
            for _ in range(2):
                judge_optimizer.zero_grad()
                fake = judge(make(noise).detach())
                batch.scale(softplus(fake).mean() + softplus(-judge(real)).mean()).backward()
                judge_optimizer.step()
            for _ in range(2):
                make_optimizer.zero_grad()
                batch.scale(softplus(-judge(make(noise))).mean()).backward()
                make_optimizer.step()
