"""Runs examples/layerwise, and keeps what each rank's layers computed in the last forward pass: `layer_outputs.py
SCRIPT …`. Each rank writes `part-RANK.pt` into the present folder: the input, the output and the parameters then."""

import os
import runpy
import sys

import torch
import torch.distributed as dist

call = torch.nn.Sequential.forward


def noting(self: torch.nn.Sequential, given: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = call(self, given)
    if isinstance(self[0], torch.nn.Sequential):  # this rank's layers, and not a part of them
        # Written at once: a session refuses copies of parameters that a script keeps.
        found = {"given": given.detach(), "output": output.detach(), "parameters": self.state_dict()}
        torch.save(found, f"part-{dist.get_rank()}.pt")
    return output


torch.nn.Sequential.forward = noting  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
