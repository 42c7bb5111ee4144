"""Short training scripts under the public `everstep-run`, three processes of one agent, as strings: what stands around
them, and how they are run.

The file `train.py` of each is HEAD, the test's own lines, and what it prints is what it says.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from support.processes import warm_agent
from support.processes.warm_python import warm

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import everstep

torch.set_num_threads(1)
torch.manual_seed(0)

def say(**what):
    with open(f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(what) + "\\n")

def die(name="killed"):
    "Once in the job."
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def digest(*modules):
    return [float(p.detach().double().sum()) for m in modules for p in m.parameters()]
"""
EVERSTEP_RUN = (warm_agent.__file__, "--nproc-per-node=3")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")


def play(folder: Path, script: str, *launcher: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    (folder / "train.py").write_text(HEAD + script)
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return warm().run(*(launcher or EVERSTEP_RUN), "train.py", cwd=folder, timeout=seconds, env=variables)


def said(folder: Path) -> list[dict[str, Any]]:
    """What all processes said, those that were killed among them."""
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
