"""Runs examples/moe/train.py, and checks in each pass of the experts where its tokens are: `moe_tokens.py SCRIPT …`.

Each rank of a replica counts the tokens that it has, gives to experts, and gets back; the experts count what arrives.
At its end a rank prints the sums over all passes: of the replica tokens given, arrived and returned, and dropped.
"""

import os
import sys
from argparse import Namespace

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train

COUNTED = ("held", "given", "arrived", "worked", "returned")
counted = dict.fromkeys(COUNTED, 0)
exchange, forward = train.Exchange.apply, train.Experts.forward
exchanges = [0]


def tokens(x: torch.Tensor) -> int:
    """Of a packed buffer: the places that are not empty. A token that the norm has made is never all zeros."""
    return int(x.detach().abs().sum(-1).gt(0).sum())


def counting(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Those of forward passes, which take turns: to the experts, and back from them."""
    received = exchange(x, group)
    if not torch.is_grad_enabled():
        return received
    to_experts = exchanges[0] % 2 == 0
    exchanges[0] += 1
    counted["given" if to_experts else "worked"] += tokens(x)
    counted["arrived" if to_experts else "returned"] += tokens(received)
    return received


def entering(self: train.Experts, x: torch.Tensor) -> torch.Tensor:
    counted["held"] += len(x) // dist.get_world_size(self.mesh.get_group())
    return forward(self, x)


train.Exchange.apply = counting
train.Experts.forward = entering
train.main(Namespace(steps=int(sys.argv[2]), ranks=2, capacity=1.5, balance=0.01, every_steps=None, checkpoint=None))
print("tokens", *(counted[name] for name in COUNTED), flush=True)
