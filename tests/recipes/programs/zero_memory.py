"""Trains examples/zero for two steps under torchrun, and says how many bytes of its state each rank holds.

    torchrun … zero_memory.py FILE STAGE URL

With a URL it loads that commit before, saves what it has loaded in URL-N for N ranks, and says nothing.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import everstep

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "zero"))
from train import build


def held(tensors: list[torch.Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


out, stage, *url = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
world = dist.get_world_size()
model, optimizer = build(init_device_mesh("cpu", (world,)), int(stage), torch.device("cpu"))
if url:
    # The optimizer has its state when it has stepped; then both are filled from the commit.
    everstep.load(url[0], {"model": model, "optimizer": optimizer})
    checkpointer = everstep.Checkpointer(f"{url[0]}-{world}")
    checkpointer.save(1, {"model": model, "optimizer": optimizer})
    checkpointer.close()
else:
    for _ in range(2):
        optimizer.zero_grad()
        output = model(torch.randn(8, 64))
        between = held(list(model.parameters()))
        output.square().mean().backward()
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    state = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    told = {"parameters": held(list(model.parameters())), "gradients": held(gradients), "optimizer": held(state)}
    told["between the passes"] = between
    Path(f"{out}-{world}-{dist.get_rank()}.json").write_text(json.dumps(told))
dist.destroy_process_group()
