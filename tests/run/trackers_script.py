"""Trains a layer and logs each step by the class of docs/how-to-trackers.md that the first argument names.

The rank 0 whose file `kill` exists dies behind step 25, once.
"""

import importlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to-trackers.md"


def tracker(kind: str) -> str:
    found = re.search(rf"```python {kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, kind
    return found[1]


known: dict[str, Any] = {"os": os}
if sys.argv[1] == "tensorboard":
    known["SummaryWriter"] = importlib.import_module("torch.utils.tensorboard").SummaryWriter
else:
    known["MlflowClient"] = importlib.import_module("mlflow").MlflowClient
exec(tracker(sys.argv[1]), known)
folder, steps = Path(sys.argv[2]), int(sys.argv[3])

torch.set_num_threads(1)
torch.manual_seed(0)
with everstep.start(str(folder / "commits"), every_steps=20) as run:
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,))), global_batch=16)
    if sys.argv[1] == "tensorboard":
        log = known["TensorBoard"](run, folder / "runs")
    else:
        log = known["MLflow"](run, f"file://{folder}/store", "digits")
    for step in run.steps(loader, until=steps):
        with step as batch:
            x, y = batch.data
            loss = batch.scale(torch.nn.functional.cross_entropy(model(x), y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        log(step, loss=loss)
        if step.completed and run.rank == 0 and run.step == 25 and (kill := folder / "kill").exists():
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
