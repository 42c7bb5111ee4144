"""`everstep rehearse` on scripts whose loop is Hugging Face Trainer's or Lightning's, with real kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(360)

SHORT = ("--ranks", "2", "--steps", "12")
TRAINER = """
import os

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from everstep.train.adapters.huggingface import EverstepCallback


class Count:
    n = 0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


class Rows(torch.utils.data.Dataset):
    x = torch.randn(120, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 120

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.x[i].sum().reshape(1)}


class Warmth(TrainerCallback):
    def __init__(self):
        self.seen = SEEN

    def on_step_begin(self, args, state, control, **kwargs):
        self.ADDS += 1


class Weighted(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        self.batches = getattr(self, "batches", 0) + 1
        return super().compute_loss(model, inputs, **kwargs) * (2.0 if COUNT > 7 else 1.0)


def main():
    torch.manual_seed(0)
    arguments = TrainingArguments(
        "output", per_device_train_batch_size=BATCH, num_train_epochs=50, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, gradient_accumulation_steps=2, learning_rate=1e-2,
    )
    global warmth
    callback, warmth = EverstepCallback("commits"), Warmth()
    trainer = Weighted(model=Net(), args=arguments, train_dataset=Rows(), callbacks=[warmth, callback])
    callback.train(trainer)
    open("done", "w").close()


main()
"""
LIGHTNING = """
import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from everstep.train.adapters.lightning import EverstepCallback


class Count:
    n = 0


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.k = Count()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.k.n += 1
        return torch.nn.functional.mse_loss(self.net(x), y) * (2.0 if COUNT > 7 else 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    L.seed_everything(1)
    x = torch.randn(120, 8)
    callback = EverstepCallback("commits")
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=50, min_epochs=50,
        callbacks=[callback], logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6, shuffle=True))
    open("done", "w").close()


main()
"""


def rehearse(folder: Path, script: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report."""
    (folder / "train.py").write_text(script)
    done = play(folder, "--limit", "100", *options, seconds=300)
    return done.code, done.report


HELD = TRAINER.replace("SEEN", "Count()").replace("ADDS", "seen.n").replace("COUNT", "warmth.seen.n")
KEPT = TRAINER.replace("SEEN", "0").replace("ADDS", "seen").replace("COUNT", "warmth.seen")


def ended(report: dict[str, Any]) -> list[tuple[str, int, int, bool]]:
    """Of each run: its name, its steps, how many processes were killed, and whether it came to the script's end."""
    return [(run["name"], run["steps"], run["killed"], "done" in run["files"]) for run in report["runs"]]


CALM = [("calm", 12, 0, True), ("again", 12, 0, True)]
SIZES = [("more", 12, 2, True), ("fewer", 12, 2, True)]


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            KEPT.replace("BATCH", '12 // int(os.environ["WORLD_SIZE"])'),
            id="trainer of one global batch, whose callback counts in an attribute",
        ),
        pytest.param(
            LIGHTNING.replace("COUNT", "self.trainer.global_step").replace("self.k.n += 1", ""), id="lightning"
        ),
    ],
)
def test_script_whose_state_its_adapter_keeps_is_passed(tmp_path: Path, script: str) -> None:
    lost = "1@1:begin,1@2:backward,1@3:optimizer,1@6:between,0+1@9:backward"  # the commit is of step 5
    code, report = rehearse(tmp_path, script, *SHORT, "--at", lost)
    assert (report["findings"], ended(report), code) == ([], [*CALM, ("at", 12, 6, True)], 0)
    assert not (tmp_path / "commits").exists()


@pytest.mark.long
def test_trainer_script_of_one_global_batch_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    script = KEPT.replace("BATCH", '12 // int(os.environ["WORLD_SIZE"])')
    code, report = rehearse(tmp_path, script, *SHORT, "--kill", "size")
    assert (report["findings"], ended(report), code) == ([], [*CALM, *SIZES], 0)


@pytest.mark.long
@pytest.mark.parametrize("script", [KEPT.replace("BATCH", "4"), LIGHTNING.replace("COUNT", "0")])
def test_script_of_one_size_is_told_so_in_a_warning(tmp_path: Path, script: str) -> None:
    code, report = rehearse(tmp_path, script, *SHORT, "--kill", "size")
    assert {(f["kind"], f["certain"]) for f in report["findings"]} == {("size", False)}
    assert "--nnodes=N" in report["findings"][0]["text"]
    assert code == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "name"),
    [(HELD.replace("BATCH", "4"), "warmth.seen.n"), (LIGHTNING.replace("COUNT", "self.k.n"), "Module.k.n")],
    ids=["trainer", "lightning"],
)
def test_object_that_no_adapter_keeps_is_found_with_its_name_and_its_step(
    tmp_path: Path, script: str, name: str
) -> None:
    code, report = rehearse(tmp_path, script, *SHORT, "--at", "1@5:backward")
    (found,) = [f for f in report["findings"] if f["certain"]]
    assert found["kind"] == "tracked"
    assert found["step"] in (7, 8), "the new process counts from 0, and the other counts the repeated step twice"
    assert {name, "model"} <= set(found["names"])
    assert code == 1


MASKING = """
class Masking:
    def __init__(self):
        self.made = 0

    def __call__(self, rows):
        self.made += 1
        return torch.utils.data.default_collate(rows)


def main"""
NOISY = """
class Noisy(TensorDataset):
    made = 0

    def __getitem__(self, i):
        self.made += 1
        return super().__getitem__(i)


def main"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "name"),
    [
        (
            KEPT.replace("BATCH", "4")
            .replace("def main", MASKING)
            .replace("Rows(),", "Rows(), data_collator=Masking(),"),
            "trainer.data_collator.made",
        ),
        (
            LIGHTNING.replace("COUNT", "0")
            .replace("self.k.n += 1", "")
            .replace("def main", NOISY)
            .replace("DataLoader(TensorDataset(", "DataLoader(Noisy("),
            "train_dataloader.dataset.made",
        ),
    ],
    ids=["trainer", "lightning"],
)
def test_object_that_only_the_library_has_is_read(tmp_path: Path, script: str, name: str) -> None:
    _, report = rehearse(tmp_path, script, *SHORT, "--at", "1@5:backward")
    assert [(f["kind"], f["names"]) for f in report["findings"] if f["kind"] != "written"] == [("held", [name])]
