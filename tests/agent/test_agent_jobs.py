"""Jobs of several agents over a real etcd: training goes on when processes, agents and stores die.

Real processes, gloo over loopback. A failure prints the seed and the agents' logs. `EVERSTEP_KILLS=50` for many.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.agent.agent_job import EXPIRING, PLAIN, Agent, Job, regroup, session
from support.processes.children import children
from support.rendezvous.etcd_server import EtcdCluster

KILLS = int(os.environ.get("EVERSTEP_KILLS", "4"))
pytestmark = pytest.mark.timeout(240 + 20 * KILLS)


def goes_on(run: Job, agents: list[Agent], since: float) -> float:
    """Wait until these have made two steps, with the one that was lost back already or not: its agent may be as fast as
    they are; seconds from then until the last of them had made its first."""
    pids = [pid for agent in agents for pid in agent.trainers()]
    sizes = (len(pids), len(pids) + 1)
    first = run.until(lambda: next(filter(None, (run.trains(pids, since, s) for s in sizes)), []), "they do not go on")
    return max(step["at"] for step in first) - since


@pytest.mark.long
def test_processes_and_agents_are_killed_at_random_moments_and_all_parameters_stay_equal(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Cases 44 and 46: rank 0 and the host of the round's store as often as the others."""
    seed = int(os.environ.get("EVERSTEP_SEED", random.randrange(10**6)))
    print(f"EVERSTEP_SEED={seed}")
    chance = random.Random(seed)
    run = job(*session(tmp_path))
    began = time.monotonic()
    agents = run.start(3)
    regroup(run, agents, began)
    for _ in range(KILLS):
        time.sleep(chance.random() * 0.3)
        victim = chance.choice(agents)
        others = [a for a in agents if a is not victim]
        if chance.random() < 0.5:
            before = {pid for a in others for pid in a.trainers()}
            at = run.strike(victim.trainers()[0])
            print(f"process killed: survivors' next step after {goes_on(run, others, at) * 1e3:.0f} ms")
        else:
            before = {pid for a in others for pid in a.trainers()}
            at = run.kill(victim)
            print(f"agent killed: survivors' next step after {regroup(run, others, at) * 1e3:.0f} ms")
            agents = [*others, *run.start()]
        print(f"three again after {regroup(run, agents, at):.1f} s")
        assert before <= {pid for a in agents for pid in a.trainers()}, "a survivor lost its process"
    assert run.differing() == {}


@pytest.mark.long
def test_a_job_that_comes_to_its_end_ends_every_agent_well(job: Callable[..., Job], tmp_path: Path) -> None:
    run = job(*session(tmp_path, steps=30), cold=True)  # as users start them; the other tests begin warm
    run.start(3)
    assert run.codes() == [0, 0, 0]
    ends = [e for path in tmp_path.glob("*.jsonl") for e in run.events(int(path.stem)) if e["kind"] == "end"]
    assert [e["step"] for e in ends] == [30] * 3
    assert len({e["digest"] for e in ends}) == 1


@pytest.mark.long
def test_an_agent_that_comes_as_the_others_end_ends_well_too(job: Callable[..., Job], tmp_path: Path) -> None:
    """Whenever it comes, while they train or while they end. If they had ended, it may be of another run."""
    run = job(*session(tmp_path, steps=200, pause=0.01))
    agents = run.start(2, conf="last_call=1,ttl=10")
    run.world(agents, 0)
    (pid,) = agents[0].trainers()
    for reached in (80, 170, 195):  # a new agent takes about as long as 20 steps
        run.until(lambda reached=reached: any(e["step"] >= reached for e in run.steps(pid)), f"not step {reached}")
        run.start()
    codes = run.codes()
    assert codes[:2] == [0, 0]
    late = [agent.log.read_text() for agent, code in zip(run.agents, codes, strict=True) if code]
    assert all("an earlier run used --rdzv-id=" in log for log in late), late


@pytest.mark.long
def test_a_script_that_never_calls_us_begins_again_from_its_own_checkpoint_with_the_survivors(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Tier 0: what a process, an agent and the host of rank 0 take with them."""
    run = job(PLAIN, tmp_path)
    agents = run.start(3)

    def lines(since: float, world: int) -> list[list[str]]:
        rows = [line.split() for path in tmp_path.glob("*.steps") for line in path.read_text().splitlines()]
        return [r for r in rows if len(r) == 7 and float(r[5]) > since and int(r[2]) == world]

    def trained(since: float, world: int) -> float:
        def found() -> list[list[str]]:
            fresh = lines(since, world)
            return fresh if {int(r[1]) for r in fresh} == set(range(world)) else []

        rows = run.until(found, f"no world of {world}")
        equal: dict[str, set[str]] = {}
        for row in rows:
            equal.setdefault(row[3], set()).add(row[4])
        assert all(len(totals) == 1 for totals in equal.values()), "replicas differ"
        return max(min(float(r[5]) for r in rows if int(r[1]) == rank) for rank in range(world)) - since

    trained(0, 3)
    before = lines(0, 3)
    reached = max(int(r[3]) for r in before)
    at = run.strike(agents[1].trainers()[0])
    print(f"process killed: all three train again after {trained(at, 3):.1f} s")
    again = min(int(r[3]) for r in lines(at, 3) if r[0] not in {old[0] for old in before})
    assert again >= reached - 1, "it began from its checkpoint"
    for victim in (agents[2], agents[0]):
        at = run.kill(victim)
        left = [a for a in run.agents if a.process.poll() is None]
        print(f"agent killed: the others train again after {trained(at, len(left)):.1f} s")
        began = time.monotonic()
        run.start()
        print(f"three again after {trained(began, 3):.1f} s")


@pytest.mark.long
def test_survivor_whose_peers_machine_dies_without_a_word_stays_and_meets_its_replacement(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Its process loses the connection seconds before anybody can know why, and no restart is allowed."""
    run = job(PLAIN, tmp_path, "--steps", 100, "--wait-at", 20, nodes="2", flags=["--max-restarts=0"])
    survivor, silent = run.start(2, EXPIRING)
    run.until((tmp_path / "checkpoint.pt").exists, "nothing is trained")
    (process,) = silent.trainers()
    os.kill(silent.pid, signal.SIGSTOP)
    os.kill(process, signal.SIGKILL)
    (tmp_path / "go").touch()
    (replacement,) = run.start(conf=EXPIRING)
    run.until(lambda: survivor.process.poll() is not None, "the survivor does not end")
    assert survivor.process.returncode == 0, survivor.log.read_text()
    run.kill(silent)
    assert replacement.process.wait(60) == 0


@pytest.mark.long
def test_a_program_error_is_counted_for_the_whole_job_and_ends_it_when_there_were_too_many(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(PLAIN, tmp_path, "--fail-at", 20, nodes="2", flags=["--max-restarts=2"])
    run.start(2)
    assert run.codes() == [1, 1]
    logs = [a.log.read_text() for a in run.agents]
    assert sum(log.count("]: ValueError: no such luck\n") for log in logs) == 3
    assert all("ValueError: no such luck; all 2 restarts are used up (--max-restarts)" in log for log in logs)
    restarts = {line.split()[6] for path in tmp_path.glob("*.steps") for line in path.read_text().splitlines()}
    assert restarts <= {"0", "1", "2"}


@pytest.mark.long
def test_the_store_is_away_during_a_run_and_during_a_fault(
    job: Callable[..., Job], etcd: EtcdCluster, tmp_path: Path
) -> None:
    run = job(*session(tmp_path))
    began = time.monotonic()
    agents = run.start(3)
    regroup(run, agents, began)
    (member,) = etcd.members
    os.kill(member.pid, signal.SIGSTOP)
    try:
        at = time.monotonic()
        regroup(run, agents, at)
        os.kill(agents[0].trainers()[0], signal.SIGKILL)
        time.sleep(0.5)  # the fault happens while the store is away
    finally:
        os.kill(member.pid, signal.SIGCONT)
    back = time.monotonic()
    print(f"store back: all train again after {regroup(run, agents, back):.2f} s")
    assert run.differing() == {}


def test_an_agent_that_is_stopped_is_left_behind_and_comes_back_when_it_wakes(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Cases 51 and 52: silence, and the return of who was silent."""
    run = job(*session(tmp_path))
    began = time.monotonic()
    agents = run.start(3, EXPIRING)
    regroup(run, agents, began)
    silent = [agents[0].pid, *agents[0].fork_servers(), *(p for w in agents[0].fork_servers() for p in children(w))]
    for pid in silent:
        os.kill(pid, signal.SIGSTOP)
    at = time.monotonic()
    print(f"agent stopped: survivors' next step after {regroup(run, agents[1:], at):.1f} s")
    woken = time.monotonic()
    for pid in reversed(silent):
        os.kill(pid, signal.SIGCONT)
    print(f"three again {regroup(run, agents, woken):.1f} s after it woke")
    assert run.differing() == {}
