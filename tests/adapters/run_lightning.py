"""A Lightning script with accumulation, validation and a schedule; or with an ElasticLoader."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from typing import Any

import torch
from adapter_script import EPOCHS, Net, Points, begin, done, options
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from everstep.data import ElasticLoader
from everstep.train.adapters.lightning import Elastic, ElasticBatch, EverstepCallback


class Module(LightningModule):
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
            return self.net(**batch.data)["loss"] * batch.weight
        return self.net(**batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    given = options()
    torch.set_num_threads(1)
    elastic = given.kind == "elastic"
    module = Module(Net(given))
    loader = (
        Elastic(ElasticLoader(Points(), global_batch=given.batch, num_workers=given.workers))
        if elastic
        else DataLoader(Points(), batch_size=given.batch // 2, shuffle=True, num_workers=given.workers)
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            max_epochs=EPOCHS,
            accumulate_grad_batches=1 if elastic else 2,
            val_check_interval=0.5,
            callbacks=[EverstepCallback(given.url, every_steps=5)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader, DataLoader(Points(), batch_size=30))
        done(trainer.global_step, module.net)


if __name__ == "__main__":
    sys.exit(main())
