"""A careful script for elastic torchrun: the global batch stays, DCP saves model, optimizer and position."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import OUT, SAVE_EVERY, build, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(build())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = max((int(path.parent.name) for path in OUT.glob("dcp/*/.metadata")), default=0)
if start:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=OUT / "dcp" / str(start))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
for step in train(model, optimizer, start, rank, world):
    if step % SAVE_EVERY == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=OUT / "dcp" / str(step))
dist.destroy_process_group()
