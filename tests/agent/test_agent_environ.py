"""What `os.environ` says of a training process's place, in the processes that go on and in those that come."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.processes.environ import Setting, environment, of_round
from everstep.contract.document import Member
from everstep.membership.world_state import Round
from support.agent.agent_job import Agent, Job

pytestmark = pytest.mark.timeout(240)
SCRIPT = Path(__file__).parent / "environ_script.py"
TWO_EACH = ("--nproc-per-node=2",)


def places(run: Job, agents: list[Agent], after: int) -> dict[int, dict[str, Any]]:
    """By rank, the newest step of each process of these agents, once all are in one round that is newer than `after`.

    By the world of their process group; what the environment says of it is what is tested.
    """

    def found() -> dict[int, dict[str, Any]]:
        pids = [pid for agent in agents for pid in agent.trainers()]
        steps = [run.steps(pid)[-1] for pid in pids if run.steps(pid)]
        newest = {step["rank"]: step for step in steps if step["round"] > after and step["world"] == len(pids)}
        whole = len(newest) == len(pids) == 2 * len(agents) and len({s["round"] for s in newest.values()}) == 1
        return newest if whole else {}

    return dict(run.until(found, f"no world of agents {[a.number for a in agents]}"))


def leading(run: Job, agents: list[Agent]) -> tuple[Agent, int]:
    """The process that is rank 0, and its agent. One that was replaced is not the first of its agent's by age."""
    return next((a, pid) for a in agents for pid in a.trainers() if run.steps(pid)[-1]["rank"] == 0)


def told(steps: dict[int, dict[str, Any]], name: str) -> list[str]:
    return [steps[rank]["environ"][name] for rank in sorted(steps)]


def check(steps: dict[int, dict[str, Any]], agents: int) -> int:
    """All variables fit the process group; the round."""
    size = 2 * agents
    ranks = [str(rank) for rank in range(size)]
    assert told(steps, "RANK") == told(steps, "ROLE_RANK") == ranks
    assert told(steps, "WORLD_SIZE") == told(steps, "ROLE_WORLD_SIZE") == [str(size)] * size
    assert told(steps, "LOCAL_RANK") == [str(rank % 2) for rank in range(size)]
    assert told(steps, "LOCAL_WORLD_SIZE") == ["2"] * size
    assert told(steps, "GROUP_RANK") == [str(rank // 2) for rank in range(size)]
    assert told(steps, "GROUP_WORLD_SIZE") == [str(agents)] * size
    for name in ("MASTER_ADDR", "MASTER_PORT", "EVERSTEP_ROUND"):
        assert len(set(told(steps, name))) == 1, name
    assert told(steps, "MASTER_PORT")[0] != "0"
    number = int(steps[0]["round"])
    assert told(steps, "EVERSTEP_ROUND")[0] == str(number)
    assert told(steps, "TORCHELASTIC_RESTART_COUNT") == [str(number - 1)] * size
    return number


@pytest.mark.long
def test_survivors_and_newcomers_know_their_place_by_their_environment(job: Callable[..., Job], tmp_path: Path) -> None:
    run = job(SCRIPT, tmp_path, flags=TWO_EACH)
    agents = run.start(3)
    first = places(run, agents, 0)
    rounds = [check(first, 3)]

    # Rank 0 alone, with its neighbour on the same agent among the survivors.
    _, first_process = leading(run, agents)
    survivors = {pid for a in agents for pid in a.trainers()} - {first_process}
    run.strike(first_process)
    again = places(run, agents, rounds[-1])
    assert survivors < {pid for a in agents for pid in a.trainers()}, "a survivor lost its process"
    rounds.append(check(again, 3))

    # The agent of rank 0, which hosted the round's store: the survivors move down.
    leader, _ = leading(run, agents)
    run.kill(leader)
    left = [a for a in agents if a is not leader]
    fewer = places(run, left, rounds[-1])
    rounds.append(check(fewer, 2))
    assert told(fewer, "MASTER_PORT")[0] != told(again, "MASTER_PORT")[0]

    # A process that begins in the smaller world, and cuts its data for it.
    run.strike(left[0].trainers()[1])
    rounds.append(check(places(run, left, rounds[-1]), 2))

    whole = [*left, *run.start()]
    check(places(run, whole, rounds[-1]), 3)


def test_what_a_process_is_started_with_and_what_it_is_told_of_a_round_is_the_same() -> None:
    members = tuple(Member(i, name, local_world_size=2, address=name, store_port=7 + i) for i, name in enumerate("ab"))
    round_ = Round(5, 1, members, rendezvous="counted")
    setting = Setting({"PATH": "/bin"}, 2, "run", "trainer", 3, "/socket")
    whole = environment(setting, 1, round_, "/error")
    part = of_round(1, round_)
    assert part.items() <= whole.items()
    assert part == {
        "RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "7", "TORCHELASTIC_RESTART_COUNT": "4",
        "EVERSTEP_ROUND": "5", "EVERSTEP_RENDEZVOUS": "counted",
    }  # fmt: skip
    alone = environment(replace(setting, most=4), 1, None, "/error")
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["LOCAL_RANK"]) == ("0", "1", "1")
    assert "EVERSTEP_ROUND" not in alone
    assert "EVERSTEP_LAST_RANK" not in alone
    again = environment(setting, 1, None, "/error", last=round_)
    assert again["EVERSTEP_LAST_RANK"] == "3"
    expected = [n for n in part if n.endswith(("RANK", "WORLD_SIZE"))]
    assert [again[n] for n in expected] == [part[n] for n in expected]
    assert (again["MASTER_PORT"], "EVERSTEP_ROUND" in again) == ("0", False)
    spare = environment(setting, 1, None, "/error", expected=(1, 3))
    assert [spare[n] for n in ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")] == ["3", "6", "1", "3"]
    assert "EVERSTEP_LAST_RANK" not in spare


@pytest.mark.parametrize(
    ("least", "most", "place"),
    [(6, 6, ("5", "6", "2", "3")), (2, 6, ("0", "1", "0", "1")), (4, 4, ("1", "4", "0", "2"))],
)
def test_first_process_of_a_pod_expects_the_world_of_a_job_that_has_one_size(
    least: int, most: int, place: tuple[str, ...]
) -> None:
    inherited = {"EVERSTEP_WORKER_INDEX": "2"} if most == 6 else {}
    found = environment(Setting(inherited, 2, "run", "trainer", 3, "/s", most=most, least=least), 1, None, "/error")
    assert tuple(found[n] for n in ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")) == place


@pytest.mark.parametrize(
    ("level", "distributed", "traces"), [("info", "INFO", None), ("Detail", "DETAIL", "1"), ("", None, None)]
)
def test_one_variable_lets_torch_and_nccl_say_more_and_never_replaces_what_the_job_sets(
    level: str, distributed: str | None, traces: str | None
) -> None:
    setting = Setting({"EVERSTEP_DEBUG": level, "NCCL_DEBUG": "WARN"}, 1, "run", "trainer", 0, "/socket")
    found = environment(setting, 0, None, "/error")
    assert found.get("TORCH_DISTRIBUTED_DEBUG") == distributed
    assert found.get("TORCH_SHOW_CPP_STACKTRACES") == traces
    assert found["NCCL_DEBUG"] == "WARN"


def test_level_of_debugging_that_means_nothing_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everstep.agent.main", "script.py"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "EVERSTEP_DEBUG": "loud"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "EVERSTEP_DEBUG=loud: one of info, detail is expected" in done.stderr
