"""An agent too many waits with processes that are ready, and takes the place of a lost one. Real agents over etcd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.agent.agent_job import Agent, Job, regroup, session

pytestmark = pytest.mark.timeout(180)


def test_an_agent_that_waits_since_the_start_has_processes_when_a_member_is_lost(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(*session(tmp_path, pause=0.01), nodes="1:2")
    agents = run.start(3)

    def members() -> list[Agent]:
        return [agent for agent in agents if any(run.steps(pid) for pid in agent.trainers())]

    run.until(lambda: len(members()) == 2, "no world of two")
    staying, lost = members()
    (spare,) = (agent for agent in agents if agent not in (staying, lost))
    (waiting,) = run.until(spare.trainers, "the spare starts no process")
    run.until(lambda: any(e["kind"] == "begin" for e in run.events(waiting)), "the spare's process is not ready")
    at = run.kill(lost)
    print(f"both train again after {regroup(run, [staying, spare], at):.2f} s")
    assert spare.trainers() == [waiting], "the process that waited is the one that trains"
    assert run.differing() == {}


def test_a_spare_ends_well_when_the_job_has_succeeded(job: Callable[..., Job], tmp_path: Path) -> None:
    run = job(*session(tmp_path, steps=60, pause=0.01), nodes="1:2")
    run.start(3)
    assert run.codes() == [0, 0, 0]
