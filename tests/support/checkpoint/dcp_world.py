"""Two ranks that save a sharded model and its optimizer with `torch.distributed.checkpoint`, run as a program.

python dcp_world.py RENDEZVOUS FOLDER TRUTH      the whole state is left in TRUTH, a file of `torch.save`
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RANKS = 2


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))


def main(rank: int, rendezvous: str, folder: str, truth: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters())[:2], "lr": 0.25},
        {"params": list(model.parameters())[2:]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments, "step": 4}, checkpoint_id=folder)
    parts: dict[str, Any] = weights
    named: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    found = {
        "model": {name: whole(t) for name, t in parts.items()},
        "exp_avg": {named[p]: whole(s["exp_avg"]) for p, s in optimizer.state.items()},
    }
    if rank == 0:
        torch.save(found, truth)
    dist.barrier()
    dist.destroy_process_group()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


if __name__ == "__main__":
    child = os.fork()
    try:
        main(int(child == 0), *sys.argv[1:4])
    finally:
        if child == 0:
            sys.stdout.flush()
    if child:
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
