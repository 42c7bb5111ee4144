"""The module that Lightning's programs train."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule

from everstep.train.adapters.lightning import ElasticBatch
from support.adapters.adapter_script import Net, begin


class Module(LightningModule):  # type: ignore[misc]  # mypy does not read Lightning
    """The shared net."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.begun = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.net.steps = self.trainer.global_step
        if not self.begun:
            self.begun = True
            begin(self.trainer.global_step)
        if isinstance(batch, ElasticBatch):
            loss: torch.Tensor = self.net(**batch.data)["loss"] * batch.weight
        else:
            loss = self.net(**batch)["loss"]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
