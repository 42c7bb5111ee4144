"""Trains by Lightning with dropout, accumulation, a schedule, validation and early stopping.

    everstep-run … run_lightning_rounds.py FOLDER KIND [STEP:POINT]

Rank 1 kills itself once in that step, at that point; each step's beginning is written down, by process.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from everstep.data import ElasticLoader
from everstep.train.adapters.lightning import Elastic, EverstepCallback
from support.adapters.dying import die_once
from support.adapters.points import Points
from support.adapters.profiled import ask_once

FOLDER, KIND, KILL = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""


class Last(Callback):
    """Comes behind everstep's. Its factor of the loss is in no `state_dict`."""

    factor = 1.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.factor = 1.0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.factor *= 0.75

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.reach("ended")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.seen: list[list[float]] = []
        self.steps, self.last = 0, Last()  # the loss is weighted by both

    def reach(self, point: str) -> None:
        if f"{self.trainer.global_step}:{point}" != KILL or self.trainer.global_rank != 1:
            return
        die_once(FOLDER)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if batch_idx % 2 == 0:
            with (FOLDER / f"{os.getpid()}.steps").open("a") as file:
                file.write(f"{self.trainer.global_step}\n")
            if self.trainer.global_step == 4 and KIND == "ddp":
                (callback,) = (c for c in self.trainer.callbacks if isinstance(c, EverstepCallback))
                ask_once(callback._coordinator.live_profile, FOLDER)
        self.steps += 1
        loss = torch.nn.functional.mse_loss(self.layers(x), y) / self.steps * self.last.factor
        self.reach(f"forward{batch_idx % 2}")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reach("validating")
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append([self.trainer.global_step, self.trainer.callback_metrics["val_loss"].item()])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, stopping = Module(), EarlyStopping("val_loss", patience=50)
    callback = EverstepCallback(
        str(FOLDER / "commits"), every_steps=5 if KIND == "saving_far" else 2, in_process=KIND != "restarted"
    )
    saves = [ModelCheckpoint(FOLDER / "saved", monitor="val_loss", save_top_k=2, save_last=True)]
    saves = saves if KIND.startswith("saving") else []
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy="auto" if KIND == "auto" else "ddp",
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=0.5,
        callbacks=[stopping, module.last] if KIND == "without" else [callback, stopping, *saves, module.last],
        enable_checkpointing=bool(saves),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=str(FOLDER),
    )
    loader: Any = DataLoader(Points(48), batch_size=2, shuffle=True)
    if KIND == "elastic":
        loader = Elastic(ElasticLoader(Points(48), global_batch=12))
    trainer.fit(module, loader, DataLoader(Points(20), batch_size=4))
    found = {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "step": trainer.global_step,
        "validated": module.seen[-1],
        "patience": [stopping.wait_count, stopping.best_score],
        "attributes": [module.steps, module.last.factor],
        "pid": os.getpid(),
    }
    torch.save(found, FOLDER / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
