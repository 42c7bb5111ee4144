"""Trains a GPT-2 of two layers by Hugging Face Trainer, with dropout, accumulation, a schedule and evaluation.

    everstep-run … run_trainer.py FOLDER [STEP:POINT]

Rank 1 kills itself once in that step, at that point; each step's beginning is written down, by process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from everstep.train.adapters.huggingface import EverstepCallback
from support.adapters.profiled import ask_once

FOLDER, KILL = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
CALLBACK = EverstepCallback(str(FOLDER / "commits"))


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Fault(TrainerCallback):  # type: ignore[misc]
    """`reach(POINT)`; forward passes are counted in each step: the second is that of its last micro-batch."""

    def __init__(self) -> None:
        self.step, self.passes = 0, 0

    def reach(self, point: str) -> None:
        if f"{self.step}:{point}" != KILL or os.environ["RANK"] != "1":
            return
        try:
            (FOLDER / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        (FOLDER / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, module: torch.nn.Module, *_: Any) -> None:
        if module.training:
            self.passes += 1
            self.reach(f"forward{self.passes}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step, self.passes = state.global_step, 0
        with (FOLDER / f"{os.getpid()}.steps").open("a") as file:
            file.write(f"{self.step} {time.time()}\n")
        if self.step == 4:
            ask_once(CALLBACK._coordinator.live_profile, FOLDER)
        self.reach("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reach("end")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reach("evaluated")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reach("evaluating")


class Halving(TrainerCallback):  # type: ignore[misc]
    """Halves the rate behind each evaluation, by an attribute of its own that no checkpoint of Trainer's has."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.factor, self.losses, self.places = 1.0, [float("inf")], torch.zeros((), dtype=torch.int64)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = 0  # steps of this epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += 1
        self.places += self.seen

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        self.losses.append(metrics["eval_loss"])
        self.factor = 0.5 ** (len(self.losses) - 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= self.factor


class Before(TrainerCallback):  # type: ignore[misc]
    """Comes before everstep's, and counts where a step begins: a step in which a peer is lost begins twice."""

    begun = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        str(FOLDER / "trainer"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        logging_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    fault, stopping, halving = Fault(), EarlyStoppingCallback(early_stopping_patience=5), Halving()
    before = Before()
    model.lm_head.register_forward_hook(fault.forward)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[before, CALLBACK, stopping, halving, fault],
    )
    if KILL == "plain":
        trainer.train()
    CALLBACK.train(trainer)
    found = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "step": trainer.state.global_step,
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "evaluated": [(e["step"], e["eval_loss"]) for e in trainer.state.log_history if "eval_loss" in e],
        "patience": stopping.early_stopping_patience_counter,
        "halving": [halving.factor, halving.losses, int(halving.places)],
        "begun": before.begun,
        "pid": os.getpid(),
    }
    torch.save(found, FOLDER / f"{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main()
