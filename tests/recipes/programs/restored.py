"""Runs a script, and keeps what its model and its optimizer were when the first step of this process began.

everstep-run … restored.py SCRIPT …

Each rank writes `restored-RANK.pt` into the present folder, with whole tensors: the parameters, and the
optimizer's state of each parameter, in their order.
"""

import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist

step = torch.optim.AdamW.step
kept = [False]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def keeping(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
    if not kept[0]:
        kept[0] = True
        parameters = self.param_groups[0]["params"]
        with torch.no_grad():
            values = [whole(p).clone() for p in parameters]
            state = [{name: whole(value).clone() for name, value in self.state[p].items()} for p in parameters]
        torch.save({"parameters": values, "optimizer": state}, f"restored-{dist.get_rank()}.pt")
    return step(self, *args, **kwargs)


torch.optim.AdamW.step = keeping  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
