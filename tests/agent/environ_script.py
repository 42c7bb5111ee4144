"""A session script that says after each step what its environment and its process group say of its place. Its sampler
is made by the environment before the loop, as scripts for torchrun do."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep

NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "EVERSTEP_ROUND",
)  # fmt: skip


def main(folder: str) -> None:
    with everstep.start() as run, open(f"{folder}/{os.getpid()}.jsonl", "a", buffering=1) as file:
        model = torch.nn.Linear(2, 1)
        run.track(model=model)
        data = TensorDataset(torch.zeros(24, 1))
        ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=ranks, rank=rank))
        for step in run.steps(loader, epochs=10**6):
            with step:
                dist.all_reduce(torch.zeros(1))
                time.sleep(0.02)
            told = {name: os.environ.get(name) for name in NAMES}
            said = {"kind": "step", "step": run.step, "rank": dist.get_rank(), "world": dist.get_world_size()}
            said["round"] = run._recovery.round.announced.number
            file.write(json.dumps({"at": time.monotonic(), **said, "environ": told}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
