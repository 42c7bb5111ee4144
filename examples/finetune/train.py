"""LoRA with peft: a trained transformer stays frozen; adapters in it learn from which file a piece of text is.

    python ../gpt/train.py --checkpoint base                                     a transformer,
    everstep ckpt export base weights --format safetensors                       and its weights in a file
    everstep-run --nproc-per-node 3 train.py --base weights/model.safetensors    three processes; kill one
    kubectl apply -f job.yaml                                                    workers on a cluster; delete one

Commits hold what is learned, and the SHA-256 of the file of frozen weights. Each process reads them from that file.
"""

import argparse
import hashlib
import inspect
import json
import random
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from transformer import LENGTH, WIDTH, Base

import everstep

TEXTS = (argparse, inspect, json.decoder, random, textwrap)  # their source code is told apart


class Tuned(nn.Module):
    """Characters [rows, length] to scores of the texts [rows, texts]: a frozen base with adapters in it, and a head."""

    def __init__(self, base: Base, rank: int) -> None:
        super().__init__()
        lora = LoraConfig(r=rank, target_modules=["attention", "join", "inner", "outer"])
        base = inject_adapter_in_model(lora, base.requires_grad_(False))
        self.base = [base]  # in a list: no part of this module, so it is not committed
        layers = [layer for layer in base.modules() if isinstance(layer, LoraLayer)]
        self.adapters = nn.ModuleList(nn.ModuleList([layer.lora_A, layer.lora_B]) for layer in layers)
        self.head = nn.Linear(WIDTH, len(TEXTS))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.base[0](tokens).mean(1))


class Weights:
    """The file of the frozen weights. It is tracked, so that a run that began with another file is not continued."""

    def __init__(self, file: str) -> None:
        self.file, self.sha256 = file, hashlib.sha256(Path(file).read_bytes()).hexdigest()

    def state_dict(self) -> dict[str, str]:
        return {"sha256": self.sha256}

    def load_state_dict(self, state: dict[str, str]) -> None:
        if state["sha256"] != self.sha256:
            raise ValueError(
                f"{self.file} has the SHA-256 {self.sha256}, but the adapters of this run were trained beside a file "
                f"with {state['sha256']}: give that one to --base, or begin a new run with another --checkpoint"
            )


def pieces() -> TensorDataset:
    """Characters [pieces, LENGTH] of all texts, and the number of the text of each [pieces]."""
    texts = [torch.tensor(list(inspect.getsource(text).encode("ascii", "replace"))) for text in TEXTS]
    cut = [text.unfold(0, LENGTH, LENGTH) for text in texts]
    return TensorDataset(torch.cat(cut), torch.cat([torch.full((len(c),), i) for i, c in enumerate(cut)]))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = Base()
    weights = load_file(args.base)
    base.load_state_dict({name: value for name, value in weights.items() if not name.startswith("head.")})
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        tuned = Tuned(base.to(run.device), args.rank).to(run.device)
        model = DistributedDataParallel(tuned) if dist.is_initialized() else tuned
        optimizer = torch.optim.AdamW(tuned.parameters(), lr=3e-3)
        run.track(model=model, optimizer=optimizer, base=Weights(args.base))
        for step in run.steps(run.loader(pieces(), global_batch=24, seed=0), until=args.steps):
            with step as batch:
                tokens, texts = batch.to(run.device).data
                loss = cross_entropy(model(tokens), texts)
                batch.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="weights/model.safetensors", help="the weights of examples/gpt")
    parser.add_argument("--rank", type=int, default=2, help="of the adapters")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
