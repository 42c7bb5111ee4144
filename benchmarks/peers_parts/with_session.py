"""The same training as an elastic session of Everstep: its loader, its steps."""

import torch
import torch.distributed as dist
from gpt import BATCH, OUT, SAVE_EVERY, STEPS, Diary, Text, build, loss_of
from torch.nn.parallel import DistributedDataParallel

import everstep

with everstep.start(str(OUT / "commits"), every_steps=SAVE_EVERY) as run:
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    diary = Diary()
    for step in run.steps(run.loader(Text(), global_batch=BATCH, seed=0), until=STEPS):
        with step as batch:
            mine, pieces = batch.data
            optimizer.zero_grad()
            batch.scale(loss_of(model, pieces)).backward()
            optimizer.step()
        if step.completed:
            diary.write(run.step, dist.get_rank(), dist.get_world_size(), mine, model)
