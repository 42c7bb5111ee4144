"""Runs a script whose model is divided, and keeps what its newest step computed: `divided.py SCRIPT STEPS RANKS`.

Each rank writes into the present folder:
`logits-RANK.pt`: what the model was given, what came of it, the model's parameters then, whole, and how many tokens of
a row a block of the model was given; `target-RANK.pt`: the target of the loss;
`gradients-RANK.pt`: the gradients, whole, after they were averaged over the replicas.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everstep.train.session import Run

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train

forward, block = train.Network.forward, train.Block.forward
loss_of, average = train.cross_entropy, Run.average_gradients
tokens = [0]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def network(self: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = forward(self, given)
    if torch.is_grad_enabled():  # an evaluation computes no gradients
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


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    torch.save(target, f"target-{dist.get_rank()}.pt")
    found: torch.Tensor = loss_of(logits, target)
    return found


def averaging(self: Run, model: torch.nn.Module) -> None:
    average(self, model)
    torch.save({name: whole(p.grad) for name, p in model.named_parameters()}, f"gradients-{dist.get_rank()}.pt")


train.Network.forward, train.Block.forward, train.cross_entropy = network, noting, loss
Run.average_gradients = averaging
steps, ranks = map(int, sys.argv[2:])
train.main(Namespace(steps=steps, ranks=ranks, text=Path(os.__file__), every_steps=None, checkpoint=None))
