"""Training goes on in the same processes when others die, with the parameters that all of them agree on.

Real processes, gloo over loopback, SIGKILL at random moments; a failure prints the seed. `EVERSTEP_KILLS=200` for many.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.data import ElasticLoader
from support.processes.commits import newest_commit
from support.recovery.recovery_agents import Agents, Process
from support.recovery.recovery_script import Points, Wanted

KILLS = int(os.environ.get("EVERSTEP_KILLS", "6"))
pytestmark = pytest.mark.timeout(120 + 10 * KILLS)

Play = Callable[..., Agents]


def settled(agents: Agents, steps: int = 2) -> None:
    """All members are in the newest round and have trained in it."""
    agents.wait(agents.joined, "a member is not in the newest round")
    now = time.monotonic()
    agents.wait(lambda: agents.trained(agents.members, now, steps), "a member does not train")


def newcomer(agents: Agents) -> Process:
    found = agents.spawn()
    agents.wait(lambda: agents.said(found, "ready"), "the new process did not get ready")
    return found


def resources(p: Process) -> tuple[int, int]:
    """Threads and open files."""
    return tuple(len(os.listdir(f"/proc/{p.pid}/{name}")) for name in ("task", "fd"))  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.parametrize(
    "ddp",
    [
        pytest.param({}, id="plain"),
        # The same deaths; what this reducer does differently, test_recovery_bits.py has at fixed steps.
        pytest.param({"gradient_as_bucket_view": True, "static_graph": True}, id="static"),
    ],
)
def test_survivors_of_kills_at_random_moments_go_on_with_equal_parameters(play: Play, ddp: dict[str, Any]) -> None:
    # torch's static_graph cannot begin with a micro-batch in no_sync.
    agents = play(Wanted(ddp=ddp, scaler=bool(ddp), micro_batch=None if ddp else 4), seed=len(ddp))
    agents.begin(3)
    settled(agents)
    first = agents.members[0]
    before = resources(first)
    for _ in range(KILLS):
        time.sleep(agents.random.random() * 0.15)
        agents.kill(agents.random.choice(agents.members))
        settled(agents)
        agents.announce([*agents.members, newcomer(agents)], whole=True)
        settled(agents)
    assert agents.differing() == {}
    if first in agents.members:
        # Threads of gloo's that have lost a transfer stay for a while.
        assert all(now <= then + 4 * 2 * KILLS for now, then in zip(resources(first), before, strict=True))


@pytest.mark.long
def test_two_killed_at_once_and_one_more_while_the_others_recover(play: Play) -> None:
    agents = play(Wanted(), seed=5)
    agents.begin(4)
    settled(agents)
    a, b, c, _ = agents.members
    for p in (a, b):
        os.kill(p.pid, signal.SIGKILL)
    agents.announce(agents.members[2:])
    time.sleep(agents.random.random() * 0.03)
    agents.kill(c)
    settled(agents)
    agents.announce([newcomer(agents), *agents.members])
    settled(agents)
    assert agents.differing() == {}


@pytest.mark.long
def test_killed_in_every_phase_of_a_recovery(play: Play) -> None:
    # Case 46: the newcomer, or a survivor, dies so many milliseconds after a round was announced.
    agents = play(Wanted(workers=0), seed=6)
    agents.begin(3)
    settled(agents)
    for milliseconds in (0, 3, 10, 30):
        for victim in (0, -1):
            agents.announce([*agents.members, newcomer(agents)])
            time.sleep(milliseconds / 1000)
            agents.kill(agents.members[victim])
            settled(agents, 1)
    assert agents.differing() == {}


@pytest.mark.long
def test_samples_of_each_step_are_those_of_an_undisturbed_run(play: Play) -> None:
    agents = play(Wanted(seen=True, micro_batch=None, workers=1), seed=7)
    agents.begin(3)
    settled(agents)
    for _ in range(3):
        agents.kill(agents.random.choice(agents.members))
        settled(agents, 5)
        agents.announce([*agents.members, newcomer(agents)], whole=True)
        settled(agents, 5)
    told = {p: agents.steps(p) for p in agents.all}
    upto = min(told[p][-1]["step"] for p in agents.members)  # while one diary is read, steps come into the others
    told = {p: [e for e in steps if e["step"] <= upto] for p, steps in told.items()}
    # The parameters that training went on with after each step.
    kept = {e["step"]: e["digest"] for p in agents.all for e in told[p]}
    kept |= {e["step"]: e["digest"] for p in agents.members for e in told[p]}
    seen: dict[int, list[int]] = {step: [] for step in kept}
    for events in told.values():
        for e in events:
            if e["digest"] == kept[e["step"]]:
                seen[e["step"]] += e["seen"]
    reference = ElasticLoader(Points(), global_batch=24, rank=0, world_size=1)
    expected: list[list[int]] = []
    while len(expected) < max(kept):
        expected += [batch.indices.tolist() for batch in reference]
    for step, samples in seen.items():
        assert len(set(samples)) == len(samples), f"step {step}: a sample came twice"
        assert set(samples) <= set(expected[step - 1]), f"step {step}: a sample of another step"
    # A member that a step was given to, or that died in its last lines, says nothing of that step.
    whole = sum(set(samples) == set(expected[step - 1]) for step, samples in seen.items())
    assert whole >= len(seen) - 3 * 2


# To the bit at a fixed size in test_recovery_bits.py; with two and three members in test_agent_loaders.py.
@pytest.mark.long
def test_run_with_deaths_ends_where_an_undisturbed_one_does(play: Play) -> None:
    # What is left of a difference is the order in which gradients are added up.
    wanted = Wanted(steps=120, plain=True, workers=0, pause=0.005, slow_from=60)
    still, disturbed = play(wanted, seed=8), play(Wanted(**{**wanted.__dict__}), seed=8)
    for agents in (still, disturbed):
        fresh = [newcomer(agents) for _ in range(2)] if agents is disturbed else []
        agents.begin(3)
        for new in fresh:
            settled(agents)
            agents.kill(agents.random.choice(agents.members))
            settled(agents)
            agents.announce([*agents.members, new], whole=True)
        settled(agents)
        agents.hurry()
        agents.wait(lambda a=agents: all(_end(a, p) for p in a.members), "the run did not end")
    ends = [_end(a, a.members[0]) for a in (still, disturbed)]
    assert [e["step"] for e in ends] == [120, 120]
    assert ends[0]["first"] == pytest.approx(ends[1]["first"], rel=1e-3, abs=1e-5)
    assert disturbed.differing() == {}


def _end(agents: Agents, p: Process) -> Any:
    return next((e for e in p.events(agents.folder) if e["kind"] == "end"), None)


@pytest.mark.long
def test_newcomer_at_a_boundary_costs_no_step_and_no_state_is_sent_but_to_it(play: Play) -> None:
    agents = play(Wanted())
    agents.begin(2)
    settled(agents)
    told = agents.announce([*agents.members, newcomer(agents)], whole=True)
    settled(agents)
    for p in agents.members[:2]:
        steps = [e["step"] for e in agents.steps(p)]
        assert steps == sorted(set(steps)), "a step was taken twice"
        assert steps == list(range(1, steps[-1] + 1)), "a step was lost"
        assert not any(m["kind"] == "broken" for m in p.heard)
    assert agents.steps(agents.members[2])[0]["at"] > told
    assert agents.differing() == {}


@pytest.mark.long
def test_stopped_member_that_wakes_after_it_was_evicted_trains_no_more(play: Play) -> None:
    # Case 39's likeness among workers: it is out of the round, and its peers are gone for it.
    agents = play(Wanted(), seed=3)
    agents.begin(3)
    settled(agents)
    stopped = agents.members[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    agents.announce([p for p in agents.members if p is not stopped])
    settled(agents)
    steps = len(agents.steps(stopped))
    agents.over(stopped, "evicted")
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.process.join(30)
    assert stopped.process.exitcode == 1
    assert "RoundsOver: evicted" in agents.log(stopped)
    assert len(agents.steps(stopped)) <= steps + 1, "the step that was all but done when it was stopped"
    assert agents.differing() == {}


def test_member_for_which_there_is_no_further_round_waits_for_nobody(play: Play) -> None:
    # Its peers are there and never answer, so gloo says nothing; in one of seven runs it said nothing of closed ones.
    agents = play(Wanted(), seed=3)
    agents.begin(3)
    settled(agents)
    left, *others = agents.members
    for other in others:
        os.kill(other.pid, signal.SIGSTOP)
    agents.over(left, "evicted")
    left.process.join(30)
    assert left.process.exitcode == 1
    assert "RoundsOver: evicted" in agents.log(left)


@pytest.mark.long
def test_mistake_of_the_script_is_raised_at_once_and_waits_for_no_round(play: Play) -> None:
    agents = play(Wanted(bug_at=3, workers=0))
    agents.begin(2)
    first = agents.members[0]
    first.process.join(30)
    assert first.process.exitcode == 1
    assert "RuntimeError: a mistake in the script" in agents.log(first)
    assert [e["step"] for e in agents.steps(first)] == [1, 2, 3]


@pytest.mark.long
def test_commits_go_on_after_a_kill_and_a_new_world_restores_the_newest(play: Play, tmp_path: Path) -> None:
    wanted = Wanted(url=str(tmp_path / "c"), every_steps=10, workers=0, pause=0.002)
    agents = play(wanted, seed=9)
    agents.begin(3)
    agents.wait(lambda: newest_commit(tmp_path / "c") > 0, "no commit")
    agents.kill(agents.members[0])
    settled(agents)
    before = agents.steps(agents.members[0])[-1]["step"]
    agents.wait(lambda: newest_commit(tmp_path / "c") > before, "no commit after the kill")
    # One that restored nothing, because a peer gave it the state, takes part in commits as well.
    agents.announce([newcomer(agents), *agents.members], whole=True)
    settled(agents)
    before = agents.steps(agents.members[0])[-1]["step"]
    agents.wait(lambda: newest_commit(tmp_path / "c") > before, "no commit with the newcomer")
    assert agents.differing() == {}
    agents.__exit__()
    # All are gone: case 45.
    again = play(wanted, seed=9)
    again.begin(2)
    settled(again)
    assert min(e["step"] for e in again.steps(again.members[0])) > 10
    assert again.differing() == {}
