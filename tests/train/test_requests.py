"""`everstep profile` and `everstep stacks` of a process that no agent supervises, and what becomes of it after them."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.agents import NoAgent, ask
from everstep.contract.agent_requests import PROFILE, STACKS
from everstep.jobs.source import Where
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(200)
SECONDS = 60
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, everstep
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
with everstep.start(sys.argv[1]) as run:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), global_batch=8)
    for step in run.steps(loader, until=1_000_000):
        with step as batch:
            x, y = batch.data
            batch.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
        if step.number == 3 and os.fork() == 0:  # as a loader's workers: it must answer nobody
            time.sleep(600)
        if step.number == 4:
            Path(sys.argv[2]).touch()
"""


def test_process_without_an_agent_is_profiled_and_ends_in_order_under_a_profile(tmp_path: Path) -> None:
    job, script, trains = f"alone-{uuid.uuid4().hex}", tmp_path / "train.py", tmp_path / "trains"
    script.write_text(SCRIPT)
    environ = {**os.environ, "EVERSTEP_JOB_NAME": job}
    with (tmp_path / "log").open("w") as log:
        process = warm().popen(script, tmp_path / "commits", trains, stdout=log, stderr=log, env=environ, cwd=tmp_path)
    try:
        for _ in range(SECONDS * 20):
            if trains.exists():
                break
            threading.Event().wait(0.05)
        (found,) = ask(job, Where(), PROFILE, SECONDS, [], steps=3, id="first")
        assert (found["rank"], found["steps"], found["communication"]) == (0, 3, 0), found
        assert found["input"] > 0
        assert (tmp_path / "commits/profiles/first/rank-0.json.gz").exists()
        (where,) = ask(job, Where(), STACKS, SECONDS, [])
        assert where["step"] >= found["last"]
        assert "train.py" in where["stacks"]

        answered: list[dict[str, Any]] = []

        def ask_long() -> None:
            while not answered or "goes on" in answered[0].get("error", ""):  # the other one came first
                answered[:] = ask(job, Where(), PROFILE, SECONDS, [], steps=1000, id="long")

        asks = threading.Thread(target=ask_long)
        asks.start()
        while "profile long goes on" not in (
            ask(job, Where(), PROFILE, SECONDS, [], steps=1, id="other")[0].get("error", "")
        ):
            pass
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(SECONDS) == 86, (tmp_path / "log").read_text()[-3000:]
        asks.join(SECONDS)
        assert "ended before" in answered[0]["error"], answered
        with pytest.raises(NoAgent):
            ask(job, Where(), STACKS, SECONDS, [])
    finally:
        process.kill()
