"""Runs a script whose model is divided, and keeps its newest logits: `divided_logits.py SCRIPT STEPS RANKS`.

Each rank writes `logits-RANK.pt` into the present folder: what the model was given in its last forward pass and what
came of it, the model's parameters then, whole, and how many tokens of a row a block of the model was given.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train

forward, block = train.Network.forward, train.Block.forward
tokens = [0]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def network(self: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = forward(self, given)
    with torch.no_grad():
        parameters = {name: whole(value) for name, value in self.state_dict().items()}
    # Written at once: a session refuses copies of parameters that a script keeps.
    found = {"given": given, "logits": logits.detach(), "parameters": parameters, "tokens": tokens[0]}
    torch.save(found, f"logits-{dist.get_rank()}.pt")
    return logits


def noting(self: torch.nn.Module, x: torch.Tensor, *where: Any) -> torch.Tensor:
    tokens[0] = x.shape[1]
    y: torch.Tensor = block(self, x, *where)
    return y


train.Network.forward, train.Block.forward = network, noting
steps, ranks = map(int, sys.argv[2:])
train.main(Namespace(steps=steps, ranks=ranks, text=Path(os.__file__), every_steps=None, checkpoint=None))
