"""What a framework's run that goes on from a commit keeps, or is refused with: switches of modules, and its data."""

# ruff: noqa: PLC0415  imported where used: collecting these tests must not cost every run of the suite ten seconds

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from everstep.recovery.errors import LoopError
from support.adapters.split import Split, module_of
from support.processes.commits import commits

pytestmark = pytest.mark.timeout(300)  # importing a framework on a busy machine

EPOCH = 8  # steps


class Net(torch.nn.Module):
    """Its head is frozen before step 2, by a hook that a run which goes on behind that step does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.head(self.norm(self.body(x)))
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}

    def before(self, step: int) -> None:
        if step == 2:
            self.head.requires_grad_(False)


def huggingface(folder: Path, steps: int, seed: int, **options: Any) -> Net:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from everstep.train.adapters.huggingface import EverstepCallback

    class Freezing(TrainerCallback):  # type: ignore[misc]  # the package has no types
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            net.before(state.global_step)

    net = Net()
    args = TrainingArguments(
        str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=4, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    callback = EverstepCallback(str(folder / "commits"), every_steps=2, **options)
    callback.train(Trainer(model=net, args=args, train_dataset=Split(seed), callbacks=[callback, Freezing()]))
    return net


def lightning(folder: Path, steps: int, seed: int, **options: Any) -> Net:
    from lightning.pytorch import Callback, Trainer

    from everstep.train.adapters.lightning import EverstepCallback

    class Freezing(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.net.before(trainer.global_step)

    module = module_of(Net(), partial(torch.optim.AdamW, lr=1e-2))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=steps // EPOCH, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        callbacks=[EverstepCallback(str(folder / "commits"), every_steps=2, **options), Freezing()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(Split(seed), batch_size=4))
    net: Net = module.net
    return net


def accelerate(folder: Path, steps: int, seed: int, **options: Any) -> Net:
    from accelerate import Accelerator

    from everstep.train.adapters.accelerate import start

    accelerator, net = Accelerator(cpu=True), Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Split(seed), batch_size=4))
    objects = {"model": model, "optimizer": optimizer, "loader": loader}
    with start(accelerator, str(folder / "commits"), every_steps=2, **objects, **options) as run:
        for _ in run.epochs(steps // EPOCH):
            for batch in run.batches():
                net.before(run.completed)
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                run.step()
    return net


FRAMEWORKS = [huggingface, lightning, accelerate]
Train = Callable[..., Net]


@pytest.mark.long_but("accelerate")
@pytest.mark.parametrize("train", FRAMEWORKS)
def test_layer_that_a_callback_froze_stays_frozen_behind_a_commit(train: Train, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 16, 0)
    train(tmp_path / "parts", 8, 0)
    resumed = train(tmp_path / "parts", 16, 0)
    assert not any(p.requires_grad for p in resumed.head.parameters())
    for (name, p), q in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.long_but("accelerate")
@pytest.mark.parametrize("train", FRAMEWORKS)
def test_other_data_are_refused_at_each_start(train: Train, tmp_path: Path) -> None:
    train(tmp_path, 8, 0)
    for seed in (1, 2, 1):
        with pytest.raises(LoopError, match="of Split reads otherwise than when the run was saved") as told:
            train(tmp_path, 16, seed)
        assert "run.loader(" not in str(told.value), "a method that these scripts do not have"
        assert "compare_samples=False), in one run" in str(told.value)
        assert commits(tmp_path)[-1] == 8
    train(tmp_path, 16, 1, compare_samples=False)
    assert commits(tmp_path)[-1] == 16
