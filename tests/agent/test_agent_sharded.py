"""A job of replicas × shards under its agents: each agent runs the processes of one replica."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import TESTS
from support.agent.agent_job import Agent, Job

pytestmark = pytest.mark.timeout(300)
SCRIPT = TESTS / "support" / "recovery" / "sharded_script.py"


def differing(run: Job) -> set[tuple[int, int]]:
    """Steps and shards that replicas that live disagree about."""
    found: dict[tuple[int, int], set[str]] = {}
    for pid in [pid for agent in run.agents if agent.process.poll() is None for pid in agent.trainers()]:
        for e in run.steps(pid):
            found.setdefault((e["step"], e["shard"]), set()).add(e["digest"])
    return {key for key, digests in found.items() if len(digests) > 1}


def both(run: Job, agents: list[Agent], since: float) -> bool:
    pids = [pid for agent in agents for pid in agent.trainers()]
    return len(pids) == 4 and bool(run.trains(pids, since, 4))


@pytest.mark.long
def test_replica_that_lost_a_process_or_its_agent_comes_back_and_the_other_goes_on(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    seed = int(os.environ.get("EVERSTEP_SEED", random.randrange(10**6)))
    print(f"EVERSTEP_SEED={seed}")
    chance = random.Random(seed)
    run = job(SCRIPT, json.dumps({"out": str(tmp_path)}), nodes="1:2", flags=["--nproc-per-node=2"])
    agents = run.start(2)
    run.world(agents, 0)
    for whole_agent in (False, True):
        time.sleep(chance.random() * 0.3)
        victim = chance.choice(agents)
        (other,) = [a for a in agents if a is not victim]
        pids = other.trainers()
        at = run.kill(victim) if whole_agent else run.strike(chance.choice(victim.trainers()))
        # With the lost one back already or not: its agent may be faster than two steps.
        first = run.until(
            lambda p=pids, t=at: run.trains(p, t, 2) or run.trains(p, t, 4), "the other replica does not go on"
        )
        print(f"the other replica's next step after {(max(e['at'] for e in first) - at) * 1e3:.0f} ms")
        if whole_agent:  # not before, or it may be there as soon as the others miss the old one
            agents = [other, *run.start()]
        run.until(lambda a=agents, t=at: both(run, a, t), "the replica does not come back")
        print(f"both replicas again after {time.monotonic() - at:.1f} s")
        assert other.trainers() == pids
        for pid in pids:
            numbers = [e["step"] for e in run.steps(pid) if e["at"] > at]
            assert numbers == sorted(set(numbers)), "a step was made twice"
            assert numbers[-1] - numbers[0] + 1 - len(numbers) <= 2, "more was lost than the last lines of a step"
    assert differing(run) == set()


@pytest.mark.long
def test_an_agent_that_is_asked_to_stop_leaves_no_step_behind_though_nobody_else_has_its_part(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """A replica over two agents, and a third that waits: the state is committed before the part goes, and loaded."""
    how = {"out": str(tmp_path), "shard": 2, "url": str(tmp_path / "commits")}
    run = job(SCRIPT, json.dumps(how), nodes="2:2")
    agents = run.start(3)

    def members() -> list[Agent]:
        return [agent for agent in agents if any(run.steps(pid) for pid in agent.trainers())]

    run.until(lambda: len(members()) == 2, "no world of two")
    leaver, staying = members()
    (spare,) = [agent for agent in agents if agent not in (leaver, staying)]
    run.until(spare.trainers, "the agent that waits has no process")
    os.kill(leaver.pid, signal.SIGTERM)
    run.until(lambda: leaver.process.poll() is not None, "it does not leave")
    assert leaver.process.returncode == 86
    at = time.monotonic()
    run.until(lambda: run.trains([*staying.trainers(), *spare.trainers()], at, 2), "the others do not go on")
    steps = [e["step"] for pid in staying.trainers() for e in run.steps(pid)]
    assert steps == list(range(steps[0], steps[-1] + 1)), "a step was left out, or made twice"


@pytest.mark.long
def test_replica_over_two_agents_stays_whole_when_another_loses_an_agent(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    # Agents of one process each; that sizes are 2 or 4 says that two are a group. Without a commit a lost shard would
    # cost the processes.
    conf = "last_call=20,ttl=3,allowed=2:4"
    run = job(SCRIPT, json.dumps({"out": str(tmp_path)}), nodes="2:4")
    agents = run.start(4, conf)
    run.world(agents, 0)
    rank = {agent: run.steps(agent.trainers()[0])[-1]["rank"] for agent in agents}
    left, victim, *whole = sorted(agents, key=lambda agent: rank[agent])
    before = {agent: agent.trainers() for agent in (left, *whole)}
    at = run.kill(victim)
    pids = [pid for agent in whole for pid in agent.trainers()]
    first = run.until(lambda: run.trains(pids, at, 2), "the whole replica does not go on")
    print(f"its next step after {(max(e['at'] for e in first) - at) * 1e3:.0f} ms")
    assert [e["shard"] for e in first] == [0, 1]
    agents = [left, *whole, *run.start(1, conf)]
    run.until(lambda: both(run, agents, at), "the other replica does not come back")
    assert {agent: agent.trainers() for agent in before} == before
    for pid in pids:
        numbers = [e["step"] for e in run.steps(pid)]
        assert numbers == sorted(set(numbers)), "a step was made twice"
        assert numbers[-1] - numbers[0] + 1 - len(numbers) <= 1, "more was lost than the last lines of a step"
    assert differing(run) == set()
