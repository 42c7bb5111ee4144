"""Runs examples/finetune, and says how many of its frozen tensors are at its end those of their file, bit by bit.

everstep-run … finetune_base.py SCRIPT WEIGHTS STEPS
"""

import os
import sys
from argparse import Namespace
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train

bases = []


class Tuned(train.Tuned):
    def __init__(self, base: train.Base, *args: Any) -> None:
        super().__init__(base, *args)
        bases.append(base)


train.Tuned = Tuned
train.main(Namespace(base=sys.argv[2], rank=2, steps=int(sys.argv[3]), every_steps=None, checkpoint=None))
(base,) = bases
file = train.load_file(sys.argv[2])
# peft puts a layer that it adapts one level deeper, and its adapters beside it.
held = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if ".lora_" not in name}
same = [
    name for name, value in held.items() if torch.equal(value.cpu().view(torch.uint8), file[name].view(torch.uint8))
]
print(f"untouched {len(same)} of {len(held)}", flush=True)
