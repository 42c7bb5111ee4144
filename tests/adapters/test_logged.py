"""A commit has the numbers that a framework has logged in its step and behind it, and no older ones."""

# ruff: noqa: PLC0415  imported where used: collecting these tests must not cost every run of the suite ten seconds

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep.checkpoint import Catalog
from everstep.storage import MemoryStore


def test_number_of_a_validation_is_in_the_commit_of_its_step_and_in_no_later_one() -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from everstep.train.adapters.lightning import EverstepCallback

    class Module(LightningModule):  # type: ignore[misc]  # its types are not followed
        """Logs how many steps were made."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("before", float(self.trainer.global_step))
            return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validated", float(self.trainer.global_step))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    store = MemoryStore()
    checkpointer = everstep.Checkpointer(store=store, every_steps=1, keep=50)

    class Waits(Callback):  # type: ignore[misc]
        """A save that comes while one is in flight would be left out."""

        def on_train_batch_start(self, *_: Any) -> None:
            checkpointer.wait(60)

    loader = DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=1, val_check_interval=3, enable_checkpointing=False,
            callbacks=[EverstepCallback(checkpointer), Waits()], enable_progress_bar=False, enable_model_summary=False,
            logger=False,
        )  # fmt: skip
        trainer.fit(Module(), loader, loader)
    found = {commit.step: dict(commit.metrics) for commit in Catalog(store).list()}
    validated = {3: {"validated": 3.0}, 6: {"validated": 6.0}}
    assert found == {step: {"before": step - 1.0} | validated.get(step, {}) for step in range(1, 7)}
