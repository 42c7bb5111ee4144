"""`everstep rehearse --kill store`: for some steps the store of commits is away, and the agent with its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(360)

SCRIPT = """
import torch
import everstep

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(60, 8))
with everstep.start("commits", every_steps=4) as run:
    weight = torch.zeros(1)
    run.track(weight=weight)
    for step in run.steps(run.loader(dataset, global_batch=6), until=100):
        with step as batch:
            weight += 1
"""
# It takes a save for done that may come to nothing, and ends where it does.
STRICT = """
import os
import torch
import torch.distributed as dist
import everstep

torch.manual_seed(0)
dist.init_process_group("gloo")
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = torch.nn.parallel.DistributedDataParallel(net)
state = {"model": net, "optimizer": optimizer}
checkpointer = everstep.Checkpointer("commits", every_steps=4)
for step in range(checkpointer.restore(state) or 0, 100):
    model(torch.ones(2, 8) * step).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if checkpointer.should_save(step + 1):
        checkpointer.save(step + 1, state).wait(2.0)
"""


def rehearse(folder: Path, script: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report. The runs are kept below `folder`."""
    (folder / "project").mkdir()
    (folder / "project" / "train.py").write_text(script)
    options = ["--ranks", "2", "--steps", "16", "--limit", "100", "--kill", "store", "--keep"]
    environ = {"TMPDIR": str(folder)}
    done = play(folder / "project", *options, seconds=300, report="../r.json", environ=environ)
    return done.code, done.report


def test_run_without_its_stores_for_a_while_ends_as_a_calm_one(tmp_path: Path) -> None:
    code, report = rehearse(tmp_path, SCRIPT)
    assert (report["findings"], code) == ([], 0)
    run = report["runs"][-1]
    assert (run["name"], run["steps"], run["killed"]) == ("store", 16, 0)
    (kept,) = tmp_path.glob("everstep-rehearsal-*/store")
    assert list(kept.glob("away-*")), "no request came while the store was away"
    assert (kept / "rounds-back").exists()


@pytest.mark.long
def test_script_that_ends_where_a_save_is_late_is_found(tmp_path: Path) -> None:
    code, report = rehearse(tmp_path, STRICT)
    (found,) = [one for one in report["findings"] if one["certain"]]
    assert (found["kind"], found["runs"], code) == ("ended", ["stores away from step 4 to 12"], 1)
    assert "TimeoutError" in found["text"]
