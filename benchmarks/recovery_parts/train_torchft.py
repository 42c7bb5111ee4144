"""The script of the recovery benchmark for torchft: `train_torchft.py OUT`; net, steps and diary of `train.py`.

Each process is a replica group of its own, under a torchrun of its own that starts it anew, as torchft's example has
it. Run by an interpreter that has torchft.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from train import STEP_SECONDS, WIDTH, build_net, write_line

MOST = timedelta(seconds=10)  # for a collective, a quorum, a connection


def main(out: Path) -> None:
    net = build_net()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=MOST),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=MOST,
        quorum_timeout=timedelta(seconds=120),
        connect_timeout=MOST,
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    with (out / f"{os.getpid()}.steps").open("a", buffering=1) as diary:
        while True:
            step = manager.current_step()
            optimizer.zero_grad()  # begins a quorum
            rank = manager.participating_rank() or 0
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step * 64 + rank))
            model(x).square().mean().backward()
            time.sleep(STEP_SECONDS)
            optimizer.step()
            if manager.current_step() == step:
                continue  # it was not committed
            write_line(diary, rank, manager.num_participants(), manager.current_step(), net)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
