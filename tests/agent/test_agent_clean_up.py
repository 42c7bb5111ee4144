"""A block around the loop runs a collective when it is left, as Accelerate's LocalSGD does, and an error leaves it.

The error is the job's, and a restart may heal it. The collective is no mistake of the script.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import everstep
from support.agent.ordinary_scripts import EVERSTEP_RUN, play

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
class Averaging:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        dist.all_reduce(torch.ones(1))

def fail(name="failed"):
    "Once in the job."
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return
    RAISE

def loop():
    for step in run.steps(until=12):
        if BETWEEN and run.step == 6 and run.rank in RANKS:
            fail()
        with step:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            if not BETWEEN and step.number == 6 and run.rank in RANKS:
                fail()
            optimizer.step()

with everstep.start("commits", every_steps=4) as run:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    BODY
"""
AROUND = "with Averaging(): loop()"
CAUGHT = "\n    try: loop()\n    except OSError: dist.all_reduce(torch.ones(1))"
OS_ERROR = "raise OSError('the disk went away')"


def script(body: str, error: str, *, between: bool, ranks: tuple[int, ...]) -> str:
    values = {"RAISE": error, "BETWEEN": repr(between), "RANKS": repr(ranks), "BODY": body}
    text = SCRIPT
    for name, value in values.items():
        text = text.replace(name, value)
    return text


@pytest.mark.long_but("step")
@pytest.mark.parametrize(
    ("body", "between", "ranks"),
    [(AROUND, False, (1,)), (AROUND, True, (1,)), (CAUGHT, False, (1,)), (AROUND, False, (0, 1, 2))],
    ids=["step", "between", "caught", "all"],
)
def test_error_that_a_restart_heals_is_restarted(
    body: str, between: bool, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    text = script(body, OS_ERROR, between=between, ranks=ranks)
    ended = play(tmp_path, text, *EVERSTEP_RUN, "--max-restarts=2")
    assert "OSError: the disk went away" in ended.stderr
    assert "everstep: refused" not in ended.stderr, ended.stderr
    assert "which the script caught" not in ended.stderr, "the message names a `try` that is not there"
    assert ended.returncode == 0, ended.stderr
    assert everstep.load(str(tmp_path / "commits")).step == 12


@pytest.mark.long
def test_exit_code_of_the_script_is_the_job_s(tmp_path: Path) -> None:
    text = script(AROUND, "sys.exit(3)", between=True, ranks=(0, 1, 2))
    ended = play(tmp_path, text, *EVERSTEP_RUN, "--max-restarts=0")
    assert (ended.returncode, "refused" in ended.stderr) == (3, False), ended.stderr
