"""fit.py FOLDER stock|everstep: a small network by Lightning."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from marks import BATCH, FOLDER, LIBRARY_ALONE, Points, watch
from torch.utils.data import DataLoader

from everstep.train.adapters.lightning import EverstepCallback


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = batch["input_ids"].float()
        return torch.nn.functional.mse_loss(self.net(tokens), tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    callbacks = [] if LIBRARY_ALONE else [EverstepCallback(str(FOLDER / "commits"))]
    trainer = Trainer(
        accelerator="cpu", devices=3, strategy="ddp", max_epochs=1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    watch()
    trainer.fit(Module(), DataLoader(Points(), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
