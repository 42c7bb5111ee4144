"""Trains two small layers; the rank that the file SLEEPER names stops in its step until that file is gone."""

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep


def wait_while(sleeper: Path, rank: int) -> None:
    while sleeper.exists() and sleeper.read_text() == str(rank):
        time.sleep(0.05)


def main(sleeper: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with everstep.start(every_steps=1000) as run:
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
        loader = run.loader(data, global_batch=64)
        for step in run.steps(loader, until=100_000):
            with step as batch:
                x, y = batch.data
                loss = batch.scale(torch.nn.functional.cross_entropy(model(x), y))
                loss.backward()
                wait_while(sleeper, run.rank)
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
