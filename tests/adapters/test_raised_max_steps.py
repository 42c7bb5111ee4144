"""A finished run whose `max_steps` is raised goes on with the data that an undisturbed run would have read."""

# ruff: noqa: PLC0415  imported where used: collecting these tests must not cost every run of the suite ten seconds

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from everstep.contract.refusal import steps_done

pytestmark = pytest.mark.timeout(300)  # importing a framework on a busy machine

ROWS, BATCH = 32, 4  # 8 batches an epoch


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([float(index), 1.0, 2.0])
        return {"x": x, "labels": x.sum().reshape(1)}


read: list[list[int]] = []  # rows of each batch that was trained on; an attribute of the module would be restored


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        read.append([int(v) for v in x[:, 0]])
        y = self.layer(self.dropout(x / ROWS))
        return {"loss": torch.nn.functional.mse_loss(y, labels / ROWS), "logits": y}


def lightning(folder: Path, steps: int, kind: str = "shuffled") -> Net:
    from lightning.pytorch import LightningModule, Trainer

    from everstep.data import ElasticLoader
    from everstep.train.adapters.lightning import Elastic, EverstepCallback

    class Module(LightningModule):  # type: ignore[misc]  # its types are not followed
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**(batch.data if kind == "elastic" else batch))["loss"]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("seen", torch.tensor(1.0))  # is never better

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "seen"}}

    module = Module()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        accumulate_grad_batches=2 if kind == "accumulated" else 1,
        callbacks=[EverstepCallback(str(folder / "commits"), every_steps=3)],
    )  # fmt: skip
    loader: Any = DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    if kind == "elastic":
        loader = Elastic(ElasticLoader(Rows(), global_batch=BATCH))
    trainer.fit(module, loader, DataLoader(Rows(), batch_size=ROWS))
    assert trainer.global_step == steps
    return module.net


def lightning_elastic(folder: Path, steps: int) -> Net:
    return lightning(folder, steps, "elastic")


def lightning_accumulated(folder: Path, steps: int) -> Net:
    return lightning(folder, steps, "accumulated")


def huggingface(folder: Path, steps: int) -> Net:
    from transformers import Trainer, TrainingArguments

    from everstep.train.adapters.huggingface import EverstepCallback

    net = Net()
    args = TrainingArguments(
        str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=BATCH, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    callback = EverstepCallback(str(folder / "commits"), every_steps=3)
    callback.train(Trainer(model=net, args=args, train_dataset=Rows(), callbacks=[callback]))
    return net


ADAPTERS = [lightning, lightning_elastic, lightning_accumulated, huggingface]


@pytest.mark.long_but("huggingface")
@pytest.mark.parametrize("train", ADAPTERS)
def test_run_whose_max_steps_are_raised_reads_as_an_undisturbed_one(train: Callable[..., Net], tmp_path: Path) -> None:
    """Stopped in the middle of an epoch, at its end, and behind its first step."""
    read.clear()
    whole = train(tmp_path / "whole", 17)
    undisturbed = read.copy()
    read.clear()
    before = steps_done()
    for steps in (4, 6, 8, 11, 16, 17):
        net = train(tmp_path / "parts", steps)
        assert read == undisturbed[: len(read)], f"raised to {steps}"
        assert steps_done() - before == steps, "a late refusal would tell another number of steps"
    assert read == undisturbed
    for (name, p), q in zip(whole.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(p, q), name
