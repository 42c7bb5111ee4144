"""The script of `torchrun_dcp.py` with Everstep's Checkpointer in the place of DCP."""

import torch
import torch.distributed as dist
from gpt import BATCH, OUT, PIECES, SAVE_EVERY, Diary, Text, build, loss_of, order
from torch.nn.parallel import DistributedDataParallel

import everstep

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(build())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpointer = everstep.Checkpointer(str(OUT / "commits"), every_steps=SAVE_EVERY)
state = {"model": model, "optimizer": optimizer}
step = checkpointer.restore(state) or 0
text, numbers, diary = Text(), order(), Diary()
for first in range(step * BATCH, PIECES, BATCH):
    mine, pieces = zip(*(text[i] for i in numbers[first : first + BATCH][rank::world]), strict=True)
    optimizer.zero_grad()
    loss_of(model, torch.stack(pieces)).backward()
    optimizer.step()
    step += 1
    diary.write(step, rank, world, torch.tensor(mine), model)
    if checkpointer.should_save(step):
        checkpointer.save(step, state)
checkpointer.close()
dist.destroy_process_group()
