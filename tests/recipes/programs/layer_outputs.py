"""Runs examples/layerwise, and keeps what its newest step computed: `layer_outputs.py SCRIPT …`.

Each rank writes into the present folder: `part-RANK.pt` has the input, the output and the parameters of its layers,
`target-RANK.pt` the target of the loss on a last rank, and `gradients-RANK.pt` the gradients of its layers after they
were averaged over the replicas.
"""

import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from everstep.train.session import Run

loss_of, average = functional.cross_entropy, Run.average_gradients
call = torch.nn.Sequential.forward


def noting(self: torch.nn.Sequential, given: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = call(self, given)
    if isinstance(self[0], torch.nn.Sequential):  # this rank's layers, and not a part of them
        # Written at once: a session refuses copies of parameters that a script keeps.
        found = {"given": given.detach(), "output": output.detach(), "parameters": self.state_dict()}
        torch.save(found, f"part-{dist.get_rank()}.pt")
    return output


def loss(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.save(target, f"target-{dist.get_rank()}.pt")
    return loss_of(logits, target, **options)


def averaging(self: Run, model: torch.nn.Module) -> None:
    average(self, model)
    torch.save({name: p.grad for name, p in model.named_parameters()}, f"gradients-{dist.get_rank()}.pt")


functional.cross_entropy, Run.average_gradients = loss, averaging
torch.nn.Sequential.forward = noting  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
