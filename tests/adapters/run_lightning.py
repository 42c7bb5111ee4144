"""A Lightning script with accumulation, validation and a schedule; or with an ElasticLoader."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from everstep.data import ElasticLoader
from everstep.train.adapters.lightning import Elastic, EverstepCallback
from support.adapters.adapter_script import EPOCHS, Net, Points, done, options
from support.adapters.lightning_module import Module


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
