"""A script of Hugging Face Trainer, with accumulation, evaluation and a schedule."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from everstep.train.adapters.huggingface import EverstepCallback
from support.adapters.adapter_script import EPOCHS, Net, Points, begin, done, options


class Tell(TrainerCallback):
    """Tells the model which step it is in, and the test where the run began."""

    def __init__(self) -> None:
        self.seen = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].steps = state.global_step
        if not self.seen:
            self.seen = True
            begin(state.global_step)


class Decay(TrainerCallback):
    """Lowers the rate by attributes that no checkpoint of Trainer's has: a count, and a mean in a tensor."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps, self.evaluated, self.mean = 0, 0, torch.zeros(())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        self.evaluated += 1
        self.mean += (metrics["eval_loss"] - self.mean) / self.evaluated

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.95**self.steps / (1 + float(self.mean))


def main() -> None:
    given = options()
    torch.set_num_threads(1)
    net = Net(given)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=given.batch // 2,
            gradient_accumulation_steps=2,
            num_train_epochs=EPOCHS,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            eval_strategy="steps",
            eval_steps=5,
            logging_steps=3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_num_workers=given.workers,
            max_steps=17 if given.kind == "short" else -1,
        )
        callback = EverstepCallback(given.url, every_steps=5)
        trainer = Trainer(
            model=net,
            args=args,
            train_dataset=Points(),
            eval_dataset=Points(),
            callbacks=[callback, Decay(), Tell()],
        )
        if given.kind == "plain":
            trainer.train()
        result = callback.train(trainer)
        done(result.global_step, net)
        print(f"logged={[entry['step'] for entry in trainer.state.log_history]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
