"""A rank is lost when a save is due: the world that goes on makes up for that save, and waits for no later one."""

from __future__ import annotations

from pathlib import Path

import pytest

import everstep
from support.agent.ordinary_scripts import EVERSTEP_RUN, play

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
from everstep.storage.backends.local import LocalStore
from everstep.train.coordination.step_coordinator import StepCoordinator

def before(cls, name, dies):
    "Die before a call of this method that `dies` is true for."
    method = getattr(cls, name)
    def call(self, *arguments, **options):
        if int(os.environ["RANK"]) == LOST and dies(self, *arguments):
            die()
        return method(self, *arguments, **options)
    setattr(cls, name, call)

with everstep.start("commits", every_steps=6, keep=100) as run:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    MOMENT
    for step in run.steps(until=16):
        with step:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        time.sleep(0.05)
"""
COUNTED = 'before(StepCoordinator, "agree", lambda self: self.step == 6)'
WRITES = 'before(LocalStore, "put", lambda self, name, *_: name.startswith("data/") and name.endswith(".safetensors"))'


@pytest.mark.long_but("1-counted")
@pytest.mark.parametrize("moment", [COUNTED, WRITES], ids=["counted", "writes"])
@pytest.mark.parametrize("lost", [1, 0])
def test_save_that_is_lost_with_a_rank_is_made_in_one_of_the_next_steps(lost: int, moment: str, tmp_path: Path) -> None:
    text = SCRIPT.replace("LOST", str(lost)).replace("MOMENT", moment)
    ended = play(tmp_path, text, *EVERSTEP_RUN, "--max-restarts=2")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "killed").exists()
    steps = [found.step for found in everstep.Checkpointer(str(tmp_path / "commits")).list()][::-1]
    assert steps[-2:] == [12, 16], steps
    assert 6 <= steps[0] <= 9, steps
    assert len(steps) == 3, steps
