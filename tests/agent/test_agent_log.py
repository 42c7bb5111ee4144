"""What `everstep-run` says at its default log level while faults are mended."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.agent.processes.running import Settling
from support.agent.agent_job import Agent, Job

pytestmark = pytest.mark.timeout(240)
SCRIPT = Path(__file__).parent / "environ_script.py"
SETTLED = re.compile(r"everstep-run: round (\d+): step \d+, formed in \d+ ms, in sync in \d+ ms")


def whole(run: Job, agents: list[Agent], after: int) -> int:
    """The number of the round, newer than `after`, in which all processes of these agents train."""

    def found() -> int:
        newest = [run.steps(pid)[-1] for agent in agents for pid in agent.trainers() if run.steps(pid)]
        rounds = {step["round"] for step in newest if step["round"] > after and step["world"] == len(agents)}
        return rounds.pop() if len(newest) == len(agents) and len(rounds) == 1 else 0

    return int(run.until(found, f"no round after {after}"))


def leader(run: Job, agents: list[Agent]) -> Agent:
    return next(a for a in agents if run.steps(a.trainers()[0])[-1]["rank"] == 0)


@pytest.mark.long
def test_recovered_faults_take_a_few_lines_each_and_every_round_says_how_long_it_took(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(SCRIPT, tmp_path)
    agents = run.start(3)
    rounds = [whole(run, agents, 0)]
    run.strike(leader(run, agents).trainers()[0])
    rounds.append(whole(run, agents, rounds[-1]))
    for _ in range(2):  # the host of the round's store, which the others ask for what it knows
        lost = leader(run, agents)
        run.kill(lost)
        agents = [a for a in agents if a is not lost]
        rounds.append(whole(run, agents, rounds[-1]))
        agents += run.start()
        rounds.append(whole(run, agents, rounds[-1]))
    run.until(lambda: all(str(rounds[-1]) in settled(a) for a in agents), "no line of the last round")
    for agent in run.agents:
        log = agent.log.read_text()
        assert "frame #" not in log, log
        assert not re.search(rf"-{agent.pid}-\w+ is gone", log), log
        assert len(settled(agent)) == len(set(settled(agent))), "once a round"
    longest = next(a for a in agents if a in run.agents[:3])
    assert {str(number) for number in rounds} <= set(settled(longest)), longest.log.read_text()
    assert len(longest.log.read_text().splitlines()) <= 8 * len(rounds), longest.log.read_text()
    assert any(
        "everstep-run: round 1: this agent is out of it: rank 0: SIGKILL" in a.log.read_text() for a in run.agents
    )


def settled(agent: Agent) -> list[str]:
    return SETTLED.findall(agent.log.read_text())


def test_a_round_is_told_when_the_last_local_process_trains_and_the_slowest_counts() -> None:
    settling = Settling()
    assert settling.joined(0, {"round": 3, "step": 7, "formed": 0.02, "settled": 0.5, "how": ""}, 2) is None
    assert settling.joined(0, {"round": 4, "step": 7, "formed": 0.02, "settled": 0.1, "how": "from rank 1"}, 2) is None
    told = settling.joined(1, {"round": 4, "step": 7, "formed": 0.03, "settled": 0.05, "how": "from rank 1"}, 2)
    assert told == "round 4: step 7, formed in 30 ms, in sync in 100 ms, from rank 1"
