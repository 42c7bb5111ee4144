"""no_sync() of DDP objects with and without a static graph, in a run under torchrun."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.recovery.ddp import checks
from everstep.recovery.errors import LoopError

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checks.check_no_sync()
for options in ({}, {"static_graph": True}):
    model = DistributedDataParallel(torch.nn.Linear(2, 2), **options)
    for first in (True, False):
        try:
            with model.no_sync():
                model(torch.ones(1, 2)).sum().backward()
            print("quiet pass")
        except LoopError:
            print("refused")
        model(torch.ones(1, 2)).sum().backward()
sys.stdout.flush()
os._exit(0)  # torch may hang while it frees what DDP holds: everstep/train/coordination/group_shutdown.py
"""


def test_quiet_first_pass_of_a_static_graph_alone_is_refused_under_torchrun() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import os, sys\n" + SCRIPT], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:-1] == ["quiet pass", "quiet pass", "refused", "quiet pass"]
