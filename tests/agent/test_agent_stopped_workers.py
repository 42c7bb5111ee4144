"""SIGTERM for an agent, while its process trains and evaluates with DataLoader workers of each start method."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from support.processes import warm_agent
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(280)
LIMIT = 90.0

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

import everstep


class Points(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((3,), i / 64)


def main(context):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"batch_size": 8, "num_workers": 1, "multiprocessing_context": context, "persistent_workers": True}
    with everstep.start("commits", every_steps=100_000) as run:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        held_out = DataLoader(Points(), **options)
        for step in run.steps(DataLoader(Points(), shuffle=True, **options), until=100_000):
            with step as batch:
                optimizer.zero_grad()
                model(batch.data).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                for x in held_out:
                    model(x)
            if step.number == 1:
                open("ready", "w").close()


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.long_but("fork")
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_the_step_is_finished_and_saved_with_the_workers_that_there_are(context: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    log = tmp_path / "log"
    with log.open("wb") as out:
        agent = warm().popen(
            warm_agent.__file__, "--nproc-per-node=1", "--max-restarts=0", "train.py", context,
            cwd=tmp_path, stdout=out, stderr=out, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT
        while not (tmp_path / "ready").exists():
            assert agent.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        os.kill(agent.pid, signal.SIGTERM)
        assert agent.wait(LIMIT) == 86, log.read_text()
    finally:
        agent.kill()
    assert "its state is committed" in log.read_text()
