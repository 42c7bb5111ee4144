"""The script of `torchrun_dcp.py` with Everstep's Checkpointer in the place of DCP."""

import torch
import torch.distributed as dist
from gpt import OUT, SAVE_EVERY, build, train
from torch.nn.parallel import DistributedDataParallel

import everstep

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(build())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpointer = everstep.Checkpointer(str(OUT / "commits"), every_steps=SAVE_EVERY)
state = {"model": model, "optimizer": optimizer}
start = checkpointer.restore(state) or 0
for step in train(model, optimizer, start, rank, world):
    if checkpointer.should_save(step):
        checkpointer.save(step, state)
checkpointer.close()
dist.destroy_process_group()
