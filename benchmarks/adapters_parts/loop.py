"""loop.py FOLDER stock|everstep: a small network by a loop over what Accelerate prepared."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from marks import BATCH, FOLDER, LIBRARY_ALONE, Points, watch
from torch.utils.data import DataLoader

from everstep.train.adapters.accelerate import start


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    loader = DataLoader(Points(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), loader)
    watch()

    def learn(batch: Any) -> None:
        tokens = batch["input_ids"].float()
        accelerator.backward(torch.nn.functional.mse_loss(model(tokens), tokens))
        optimizer.step()
        optimizer.zero_grad()

    if LIBRARY_ALONE:
        for batch in loader:
            learn(batch)
        accelerator.end_training()
        return
    with start(accelerator, str(FOLDER / "commits"), model=model, optimizer=optimizer, loader=loader) as run:
        for _epoch in run.epochs(1):
            run.train(learn)


if __name__ == "__main__":
    main()
