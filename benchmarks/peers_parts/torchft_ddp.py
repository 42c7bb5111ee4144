"""The same training as torchft's DDP example has it: its sampler, its manager, its settings.

Each process is a replica group of its own, under a torchrun of its own that starts it anew. Run by an interpreter that
has torchft.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from gpt import BATCH, STEPS, Diary, Text, build, loss_of
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.data import DistributedSampler

REPLICAS = 3
net = build()
inner = torch.optim.AdamW(net.parameters(), lr=1e-3)


def load(state: dict[str, Any]) -> None:
    net.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    load_state_dict=load,
    state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=2,
    timeout=timedelta(seconds=10),
)
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, inner)
text, diary = Text(), Diary()
sampler = DistributedSampler(
    text,
    replica_rank=int(os.environ["REPLICA_GROUP_ID"]) % REPLICAS,
    num_replica_groups=REPLICAS,
    group_rank=0,
    num_replicas=1,
    shuffle=True,
)
loader = DataLoader(text, batch_size=BATCH // REPLICAS, sampler=sampler)
while manager.current_step() < STEPS:
    for mine, pieces in loader:
        if (before := manager.current_step()) >= STEPS:
            break
        optimizer.zero_grad()  # begins a quorum
        loss_of(model, pieces).backward()
        optimizer.step()
        if manager.current_step() > before:  # committed
            rank = manager.participating_rank() or 0
            diary.write(manager.current_step(), rank, manager.num_participants(), mine, net)
manager.shutdown()
