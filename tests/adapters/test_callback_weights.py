"""Weights that a callback keeps for itself, and changes in each step, are refused: no new process would have them."""

# ruff: noqa: PLC0415  imported where used: collecting these tests must not cost every run of the suite ten seconds

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from everstep.recovery.errors import LoopError
from everstep.train.adapters.script_state import CallbackWeights


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


class Shadow:
    """As torch-ema and others keep an average: tensors in a list, in an object that is no module."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in model.parameters()]

    def update(self, model: torch.nn.Module) -> None:
        for mine, p in zip(self.shadow_params, model.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.1)


class Averaging:
    """`way`: how the average is kept."""

    def __init__(self, model: torch.nn.Module, way: str) -> None:
        self.way, self.model, self.losses = way, model, [torch.zeros(())]
        if way == "module":
            self.average = AveragedModel(model)
        elif way == "object":
            self.shadow = Shadow(model)
        elif way == "dictionary":
            self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def stepped(self) -> None:
        self.losses.append(torch.rand(()))
        if self.way == "module":
            self.average.update_parameters(self.model)
        elif self.way == "object":
            self.shadow.update(self.model)
        elif self.way == "dictionary":
            self.average = {name: 0.9 * self.average[name] + 0.1 * p for name, p in self.model.named_parameters()}


def step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)


@pytest.mark.parametrize("way", ["module", "object", "dictionary"])
def test_average_that_a_callback_keeps_is_refused_after_its_second_change(way: str) -> None:
    model = network()
    callback = Averaging(model, way)
    weights = CallbackWeights([callback], model)
    weights.check()
    step(model), callback.stepped()
    weights.check()
    step(model), callback.stepped()
    with pytest.raises(LoopError, match=r"Averaging\.(average|shadow) holds weights that each step changes"):
        weights.check()


class Kept(Averaging):
    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.state_dict()}


class OfTheModel:
    def __init__(self, model: torch.nn.Module) -> None:
        self.all, self.some, self.teacher = model, list(model.parameters()), copy.deepcopy(model)


@pytest.mark.parametrize("kind", ["told by its state_dict", "the model's own", "plain", "best so far"])
def test_what_is_not_lost_or_not_changed_in_each_step_is_let_through(kind: str) -> None:
    model = network()
    kinds: dict[str, Any] = {
        "told by its state_dict": lambda: Kept(model, "module"),
        "the model's own": lambda: OfTheModel(model),
        "plain": lambda: Averaging(model, "none"),
        "best so far": lambda: Averaging(model, "none"),
    }
    callback = kinds[kind]()
    weights = CallbackWeights([callback], model)
    for number in range(6):
        weights.check()
        step(model)
        if isinstance(callback, Averaging):
            callback.stepped()
        if kind == "best so far" and number % 2:
            callback.best = copy.deepcopy(model.state_dict())
    weights.check()


def test_lightnings_own_average_of_weights_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from everstep.train.adapters.lightning import EverstepCallback

    class Regression(LightningModule):  # type: ignore[misc]  # its types are not followed
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = Trainer(
        accelerator="cpu", max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path, callbacks=[EverstepCallback(str(tmp_path / "commits")), EMAWeightAveraging()],
    )  # fmt: skip
    with pytest.raises(LoopError, match=r"EMAWeightAveraging\._average_model holds weights"):
        trainer.fit(Regression(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, generator=torch.Generator().manual_seed(index))}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


def test_average_of_a_trainers_callback_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from everstep.train.adapters.huggingface import EverstepCallback

    class Ema(TrainerCallback):  # type: ignore[misc]  # the package has no types
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.average = AveragedModel(model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.average.update_parameters(model)

    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    callback = EverstepCallback(str(tmp_path / "commits"))
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[callback, Ema()])
    with pytest.raises(LoopError, match=r"Ema\.average holds weights"):
        callback.train(trainer)
