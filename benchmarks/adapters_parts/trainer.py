"""trainer.py FOLDER stock|everstep: a GPT-2 of two layers by Hugging Face Trainer."""

from __future__ import annotations

import torch
from marks import BATCH, FOLDER, LIBRARY_ALONE, Points, watch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from everstep.train.adapters.huggingface import EverstepCallback


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    args = TrainingArguments(
        str(FOLDER / "trainer"), per_device_train_batch_size=BATCH, num_train_epochs=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=Points())
    watch()
    if LIBRARY_ALONE:
        trainer.train()
    else:
        EverstepCallback(str(FOLDER / "commits")).train(trainer)


if __name__ == "__main__":
    main()
