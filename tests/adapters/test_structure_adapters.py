"""A structure that a callback changes in a framework's loop is refused before a commit has it."""

# ruff: noqa: PLC0415  imported where used: collecting these tests must not cost every run of the suite ten seconds

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from everstep.recovery.errors import LoopError
from support.adapters.adapter_script import Net, Options, Points
from support.processes.commits import commits

pytestmark = pytest.mark.timeout(300)  # importing a framework on a busy machine

GIVEN = Options(
    url="", workers=0, term_at=None, kill_at=None, kill_after=0, rank_told=0, batch=4, kind="", pause=0, seen=None
)


def pruned(net: torch.nn.Module) -> None:
    prune.l1_unstructured(next(m for m in net.modules() if isinstance(m, torch.nn.Linear)), "weight", 0.5)


def trainer_run(folder: Path, *callbacks: Any, steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    from everstep.train.adapters.huggingface import EverstepCallback

    callback = EverstepCallback(str(folder / "commits"), every_steps=2)
    args = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    net = Net(dataclasses.replace(GIVEN))
    callback.train(Trainer(model=net, args=args, train_dataset=Points(), callbacks=[*callbacks, callback]))


def test_trainer_callback_that_prunes_is_refused_and_its_commits_are_gone_on_from(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Pruning(TrainerCallback):  # type: ignore[misc]  # the package has no types
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                pruned(kwargs["model"])

    with pytest.raises(LoopError, match=r"It changed (in step [234]|between step 2 and step 4): model\..*weight_orig"):
        trainer_run(tmp_path, Pruning(), steps=8)
    assert set(commits(tmp_path)) <= {2}
    trainer_run(tmp_path, steps=4)


def test_lightning_callback_that_adds_groups_is_refused_and_its_commits_are_gone_on_from(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import BaseFinetuning

    from everstep.train.adapters.lightning import EverstepCallback
    from support.adapters.lightning_module import Module

    class Thawing(BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net.layers[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net.layers[0], optimizer)

    class Tuned(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def fit(*callbacks: Any, epochs: int) -> None:
        trainer = Trainer(
            accelerator="cpu", devices=1, callbacks=[*callbacks, EverstepCallback(str(tmp_path / "commits"))],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=str(tmp_path), limit_val_batches=0, max_epochs=epochs,
        )  # fmt: skip
        trainer.fit(Tuned(Net(dataclasses.replace(GIVEN))), DataLoader(Points(), batch_size=4))

    fit(Thawing(), epochs=1)
    before = commits(tmp_path)
    with pytest.raises(LoopError, match=r"optimizer_0 has 2 groups of parameters, and had 1.* before the loop"):
        fit(Thawing(), epochs=3)
    assert commits(tmp_path) == before == [10]
    fit(Thawing(), epochs=1)
