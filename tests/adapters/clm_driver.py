"""Runs an unchanged script of Hugging Face Trainer, and kills rank 1 once.

    everstep-run … clm_driver.py FOLDER SCRIPT STEP:POINT [ARGUMENT…]

Points: `forward`, before the forward pass of a micro-batch; `evaluating`, in the training; `after`, in the script's own
evaluation. What the trainer holds when the script has ended is written to FOLDER, by rank; the micro-batches' steps, by
process.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from support.adapters.dying import die_once

FOLDER, SCRIPT, KILL = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
trainers: list[Any] = []


def reach(trainer: Any, point: str) -> None:
    if f"{trainer.state.global_step}:{point}" != KILL or os.environ["RANK"] != "1":
        return
    die_once(FOLDER)


def watch() -> None:
    make, step, predict = Trainer.__init__, Trainer.training_step, Trainer.prediction_step

    def made(trainer: Any, *arguments: Any, **named: Any) -> None:
        make(trainer, *arguments, **named)
        trainers.append(trainer)

    def stepped(trainer: Any, *arguments: Any, **named: Any) -> Any:
        with (FOLDER / f"{os.getpid()}.steps").open("a") as file:
            file.write(f"{trainer.state.global_step}\n")
        reach(trainer, "forward")
        return step(trainer, *arguments, **named)

    def predicted(trainer: Any, *arguments: Any, **named: Any) -> Any:
        reach(trainer, "evaluating" if trainer.is_in_train else "after")
        return predict(trainer, *arguments, **named)

    Trainer.__init__, Trainer.training_step, Trainer.prediction_step = made, stepped, predicted


def main() -> None:
    torch.set_num_threads(1)
    watch()
    sys.argv[:] = [SCRIPT, *sys.argv[4:]]
    runpy.run_path(SCRIPT, run_name="__main__")
    trainer = trainers[-1]
    found = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "step": trainer.state.global_step,
        "evaluated": [(e["step"], e["eval_loss"]) for e in trainer.state.log_history if "eval_loss" in e],
        "pid": os.getpid(),
    }
    torch.save(found, FOLDER / f"{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main()
