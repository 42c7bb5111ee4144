"""Agents that are told to stop, over a real etcd: the others train on; or, if too few would, all save and stop.

Real processes, gloo over loopback. A failure prints the agents' logs.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.agent.agent_job import PLAIN, Agent, Job, session
from support.agent.ordinary_scripts import play
from support.processes.commits import commits
from support.rendezvous.etcd_server import EtcdCluster

pytestmark = pytest.mark.timeout(180)
PREEMPTED = 86


def stop(*agents: Agent) -> float:
    at = time.monotonic()
    for agent in agents:
        os.kill(agent.pid, signal.SIGTERM)
    return at


def ended(run: Job, *agents: Agent) -> list[int]:
    run.until(lambda: all(a.process.poll() is not None for a in agents), "an agent that was asked to stop does not end")
    return [a.process.returncode for a in agents]


def newest(run: Job) -> int:
    return max(event["step"] for path in run.folder.glob("*.jsonl") for event in run.steps(int(path.stem)))


def again(run: Job) -> list[int]:
    """Steps that were begun and not completed."""
    events = [event for path in run.folder.glob("*.jsonl") for event in run.events(int(path.stem))]
    return [event["step"] for event in events if event["kind"] == "again"]


def unbroken(run: Job, pids: list[int]) -> list[float]:
    """Each process took every step once, one after the other; seconds between two steps, the longest first."""
    pauses = []
    for pid in pids:
        steps = run.steps(pid)
        numbers = [event["step"] for event in steps]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"{pid} left steps out or took one twice"
        pauses += [later["at"] - before["at"] for before, later in pairwise(steps)]
    return sorted(pauses, reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_one_of_three_is_told_to_stop_and_the_others_lose_no_step_and_no_sample(
    job: Callable[..., Job], tmp_path: Path, rank: int
) -> None:
    run = job(*session(tmp_path, steps=160, pause=0.01, seen=True, plain=True, slow_from=100))
    agents = run.start(3)
    ranks = {event["rank"]: agent for agent in agents for event in run.world(agents, 0) if _is_of(run, agent, event)}
    leaver = ranks[rank]
    others = [agent for agent in agents if agent is not leaver]
    survivors = [pid for agent in others for pid in agent.trainers()]
    (gone,) = leaver.trainers()
    at = stop(leaver)
    assert ended(run, leaver) == [PREEMPTED]
    print(f"it has ended after {time.monotonic() - at:.2f} s")
    (tmp_path / "go").touch()
    assert ended(run, *others) == [0, 0]
    last = run.steps(gone)[-1]["step"]
    pauses = unbroken(run, survivors)
    around = [_pause(run, pid, last) for pid in survivors]
    print(f"survivors' pause {[f'{1e3 * p:.0f} ms' for p in around]}, longest others {pauses[2:5]}")
    assert again(run) == [], "no step was broken off"
    for pid in survivors:
        assert {e["world"] for e in run.steps(pid) if e["step"] <= last} == {3}
        assert {e["world"] for e in run.steps(pid) if e["step"] > last} == {2}
    assert run.differing() == {}
    seen = Counter(i for pid in (*survivors, gone) for event in run.steps(pid) for i in event["seen"])
    assert len(seen) == 160 * 24
    assert set(seen.values()) == {1}, "a sample was counted twice, or not at all"


def _is_of(run: Job, agent: Agent, event: dict[str, Any]) -> bool:
    return any(event in run.steps(pid) for pid in agent.trainers())


def _pause(run: Job, pid: int, last: int) -> float:
    """Seconds from step `last` to the next."""
    at = {event["step"]: event["at"] for event in run.steps(pid)}
    return float(at[last + 1] - at[last])


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "apart"), [("2:3", 0.0), ("1:3", 0.3)])
def test_all_are_told_to_stop_and_the_newest_step_is_in_one_commit(
    job: Callable[..., Job], tmp_path: Path, nodes: str, apart: float
) -> None:
    run = job(*session(tmp_path, pause=0.01, url=str(tmp_path / "commits")), nodes=nodes)
    agents = run.start(3)
    run.world(agents, 0)
    for agent in agents:
        stop(agent)
        time.sleep(apart)  # as a cluster asks one after the other
    assert ended(run, *agents) == [PREEMPTED] * 3
    assert commits(tmp_path) == [newest(run)]
    assert again(run) == []
    assert run.differing() == {}


ASKED_AGAIN = """
import atexit
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
with everstep.start("commits") as run:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=1000):
        with step:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        if step.completed and run.step == 3 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_processes_that_are_told_to_stop_when_they_end_already_end_as_those_that_have_saved(tmp_path: Path) -> None:
    """Ranks agree to stop. An agent that hears of it later tells its process, which may be ending by then."""
    done = play(tmp_path, ASKED_AGAIN)
    assert done.returncode == PREEMPTED, done.stderr
    assert len(commits(tmp_path)) == 1


@pytest.mark.long
def test_who_is_told_to_stop_after_others_have_left_saves_what_all_have_trained(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(*session(tmp_path, pause=0.01, url=str(tmp_path / "commits")), nodes="2:3")
    agents = run.start(3)
    run.world(agents, 0)
    stop(agents[0])
    assert ended(run, agents[0]) == [PREEMPTED]
    run.world(agents[1:], time.monotonic())
    assert commits(tmp_path) == []
    stop(agents[2])
    assert ended(run, *agents[1:]) == [PREEMPTED] * 2
    assert commits(tmp_path) == [newest(run)]
    assert again(run) == []


@pytest.mark.long
def test_one_of_two_that_are_both_needed_is_told_to_stop_and_both_save_and_stop(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(*session(tmp_path, pause=0.01, url=str(tmp_path / "commits")), nodes="2")
    agents = run.start(2)
    run.world(agents, 0)
    stop(agents[0])
    assert ended(run, *agents) == [PREEMPTED] * 2
    assert commits(tmp_path) == [newest(run)]


@pytest.mark.long
def test_a_signal_to_the_whole_group_of_an_agent_ends_no_process_behind_its_back(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """As some supervisors send it."""
    run = job(*session(tmp_path, pause=0.01))
    agents = run.start(3)
    run.world(agents, 0)
    os.killpg(agents[0].pid, signal.SIGTERM)
    assert ended(run, agents[0]) == [PREEMPTED]
    run.world(agents[1:], time.monotonic())
    assert again(run) == []


@pytest.mark.long
def test_who_left_can_be_followed_by_a_new_agent(job: Callable[..., Job], tmp_path: Path) -> None:
    """An agent that is drained, and its replacement: each change at the end of a step."""
    run = job(*session(tmp_path, pause=0.01))
    agents = run.start(3)
    run.world(agents, 0)
    stop(agents[1])
    assert ended(run, agents[1]) == [PREEMPTED]
    left = [agents[0], agents[2]]
    survivors = [pid for agent in left for pid in agent.trainers()]
    run.world([*left, *run.start()], time.monotonic())
    unbroken(run, survivors)
    assert again(run) == []
    assert run.differing() == {}


@pytest.mark.long
def test_a_leaver_in_a_step_that_is_longer_than_its_time_is_killed_and_the_others_repeat_the_step(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(*session(tmp_path, pause=0.01, hold_at=20), environ={"EVERSTEP_GRACE_SECONDS": "2"})
    agents = run.start(3)
    run.world(agents, 0)
    pids = [pid for agent in agents for pid in agent.trainers()]
    run.until(lambda: all(run.steps(pid)[-1]["step"] == 20 for pid in pids), "they do not come to the long step")
    at = stop(agents[0])
    assert ended(run, agents[0]) == [PREEMPTED]
    took = time.monotonic() - at
    print(f"it was killed after {took:.2f} s")
    assert took >= 2
    (tmp_path / "go").touch()
    run.world(agents[1:], at, count=1)
    assert [pid for agent in agents[1:] for pid in agent.trainers()] == pids[1:]
    assert again(run) == [20, 20]
    unbroken(run, pids[1:])
    assert run.differing() == {}


@pytest.mark.long
def test_a_store_that_is_away_makes_all_save_and_stop(
    job: Callable[..., Job], etcd: EtcdCluster, tmp_path: Path
) -> None:
    run = job(
        *session(tmp_path, pause=0.01, url=str(tmp_path / "commits")), environ={"EVERSTEP_GRACE_SECONDS": "15"}
    )  # fmt: skip
    agents = run.start(3)
    run.world(agents, 0)
    (member,) = etcd.members
    os.kill(member.pid, signal.SIGSTOP)
    try:
        stop(agents[0])
        run.until(lambda: commits(tmp_path), "nothing was saved", 20)
    finally:
        os.kill(member.pid, signal.SIGCONT)
    run.until(lambda: agents[0].process.poll() is not None, "it does not end")
    assert agents[0].process.returncode == PREEMPTED
    assert commits(tmp_path)[0] >= 1


@pytest.mark.long
def test_a_script_that_never_calls_us_is_ended_and_the_others_begin_again_from_its_checkpoint(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(PLAIN, tmp_path)
    agents = run.start(3)

    def world(since: float, size: int) -> set[int]:
        rows = [line.split() for path in tmp_path.glob("*.steps") for line in path.read_text().splitlines()]
        return {int(r[1]) for r in rows if len(r) == 7 and float(r[5]) > since and int(r[2]) == size}

    run.until(lambda: len(world(0, 3)) == 3, "they do not train")
    at = stop(agents[0])
    assert ended(run, agents[0]) == [PREEMPTED]
    run.until(lambda: len(world(at, 2)) == 2, "the others do not train on")  # no restart is allowed: none was charged
    print(f"the others train again after {time.monotonic() - at:.1f} s")
    assert [a.process.poll() for a in agents[1:]] == [None, None]
