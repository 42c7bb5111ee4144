"""Runs an unchanged script of Lightning, and kills a rank once.

    everstep-run … fit_driver.py FOLDER SCRIPT [RANK@]STEP:POINT [ARGUMENT…]

Points: `forward`, before the forward pass of a step; `validating`; `testing`, in the test after the training. What the
trainer holds when the script has ended is written to FOLDER, by rank; the steps, by process.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from support.adapters.dying import die_once

FOLDER, SCRIPT, KILL = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
trainers: list[Any] = []


def reach(module: Any, point: str) -> None:
    wanted, _, place = KILL.rpartition("@")
    if f"{module.trainer.global_step}:{point}" != place or module.trainer.global_rank != int(wanted or "1"):
        return
    die_once(FOLDER)


def watch() -> None:
    make, training = Trainer.__init__, Strategy.training_step
    validation, test = Strategy.validation_step, Strategy.test_step

    def made(trainer: Any, *arguments: Any, **named: Any) -> None:
        make(trainer, *arguments, **named)
        trainers.append(trainer)

    def trained(strategy: Any, *arguments: Any, **named: Any) -> Any:
        module: LightningModule = strategy.lightning_module
        with (FOLDER / f"{os.getpid()}.steps").open("a") as file:
            file.write(f"{module.trainer.global_step}\n")
        reach(module, "forward")
        return training(strategy, *arguments, **named)

    def validated(strategy: Any, *arguments: Any, **named: Any) -> Any:
        reach(strategy.lightning_module, "validating")
        return validation(strategy, *arguments, **named)

    def tested(strategy: Any, *arguments: Any, **named: Any) -> Any:
        reach(strategy.lightning_module, "testing")
        return test(strategy, *arguments, **named)

    Trainer.__init__ = made
    Strategy.training_step, Strategy.validation_step, Strategy.test_step = trained, validated, tested


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    watch()
    sys.argv[:] = [SCRIPT, *sys.argv[4:]]
    runpy.run_path(SCRIPT, run_name="__main__")
    trainer = trainers[-1]
    saved = trainer.checkpoint_callback
    found = {
        "model": trainer.lightning_module.state_dict(),
        "step": trainer.global_step,
        "tested": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "best": [Path(saved.best_model_path).name, saved.best_model_score.item()],
        "pid": os.getpid(),
    }
    torch.save(found, FOLDER / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
