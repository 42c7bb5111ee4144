"""A small GPT-2 learns the characters of a text by Hugging Face's Trainer. The callback is Everstep's, and trains.

everstep-run --nproc-per-node 3 train.py      three processes; kill one
kubectl apply -f job.yaml                     workers on a cluster; delete one
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from everstep.train.adapters.huggingface import EverstepCallback

LENGTH = 32  # characters of a sample


class Characters(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of a text, LENGTH characters each: {"input_ids": [LENGTH], "labels": [LENGTH]}."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.tokens = torch.tensor([self.alphabet.index(c) for c in text])

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": piece, "labels": piece}


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = Characters(args.text.read_text())
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(data.alphabet),
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    arguments = TrainingArguments(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        warmup_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    callback = EverstepCallback(args.checkpoint, every_steps=args.every_steps)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
    callback.train(trainer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--text", type=Path, default=Path(os.__file__), help="a text file (default: a Python module)")
    parser.add_argument("--output", default="output")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
