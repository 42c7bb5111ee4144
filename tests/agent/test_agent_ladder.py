"""Where recovery in process ends: a process that cannot come is replaced; when all are gone the last commit is all.

Real processes and agents over a real etcd. A failure prints the seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import Catalog
from everstep.storage import open_store
from support.agent.agent_job import HERE, Agent, Job
from support.processes.standstill import go_on, stand_still

pytestmark = pytest.mark.timeout(240)

RECOVERY_SECONDS = 3.0


def test_a_process_that_does_not_come_in_time_is_replaced_uncharged_and_the_others_keep_theirs(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    environ = {"EVERSTEP_HANG_SECONDS": "0", "EVERSTEP_RECOVERY_SECONDS": f"{RECOVERY_SECONDS:g}"}
    run = job(HERE / "hang_script.py", tmp_path, environ=environ)
    agents = run.start(3)
    began = time.monotonic()
    run.world(agents, began)
    before = {pid: agent for agent in agents for pid in agent.trainers()}
    (tmp_path / "hang").touch()
    (said,) = run.until(lambda: list(tmp_path.glob("hangs-*")), "no process hangs")
    hangs = int(said.name.removeprefix("hangs-"))
    victim, stays = (pid for pid in before if pid != hangs)
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    run.world(agents, at)
    took = time.monotonic() - at
    print(f"three again {took:.1f} s after the kill")
    assert took >= RECOVERY_SECONDS
    assert before[stays].trainers() == [stays]
    assert before[hangs].trainers() != [hangs]
    assert all(agent.process.poll() is None for agent in agents), "--max-restarts is 0: nobody was charged"


@pytest.mark.long
def test_all_agents_killed_at_once_go_on_from_the_last_commit_to_the_bit(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Case 45: the step, the data's position, the parameters and the optimizer, and every later step."""
    seed = int(os.environ.get("EVERSTEP_SEED", random.randrange(10**6)))
    print(f"EVERSTEP_SEED={seed}")
    # Two ranks: their gradients' sum does not depend on how it is ordered.
    wanted = {"out": str(tmp_path), "url": str(tmp_path / "c"), "every_steps": 10, "seen": True, "pause": 0.005}
    run = job(HERE / "session_script.py", json.dumps(wanted), nodes="2")
    agents = run.start(2)
    run.world(agents, 0)
    run.until(lambda: len(commits(tmp_path)) >= 2, "no commits")
    time.sleep(random.Random(seed).random() * 0.5)
    run.until(lambda: stands_behind_a_commit(run, agents), "no step after a commit")
    for agent in agents:
        run.kill(agent)
    newest = commits(tmp_path)[0]
    old = everything(run)
    killed = time.monotonic()
    agents = run.start(2)
    run.world(agents, killed, 15)
    restored = [e for told in everything(run).values() for e in told if e["kind"] == "from" and e["at"] > killed]
    assert {e["step"] for e in restored} == {newest}
    assert {e["digest"] for e in restored} == {steps(old)[newest]["digest"]}
    again = {step: e for step, e in steps(everything(run), killed).items() if step in steps(old)}
    assert min(again) == newest + 1
    for step, e in again.items():
        assert e == steps(old)[step], f"step {step}"
    print(f"restored step {newest}; {len(again)} steps were made again, to the bit")


def stands_behind_a_commit(run: Job, agents: list[Agent]) -> bool:
    """All is stopped, with a step behind the newest commit; if there is none, all goes on.

    Only of what stands still does what was read hold a moment later: the next commit is tens of milliseconds away.
    """
    pids = [agent.pid for agent in agents] + [pid for agent in agents for pid in agent.trainers()]
    stand_still(pids)
    if max(steps(everything(run))) > commits(run.folder)[0]:
        return True
    go_on(reversed(pids))
    return False


def commits(folder: Path) -> list[int]:
    if not (folder / "c" / "log").exists():
        return []
    return [found.step for found in Catalog(open_store(str(folder / "c"))).list()]


def everything(run: Job) -> dict[int, list[dict[str, Any]]]:
    return {int(path.stem): list(run.events(int(path.stem))) for path in run.folder.glob("*.jsonl")}


def steps(told: dict[int, list[dict[str, Any]]], since: float = 0) -> dict[int, dict[str, Any]]:
    """Of each step that both ranks told of: the parameters' digest, and each rank's samples."""
    found: dict[int, dict[str, Any]] = {}
    for events in told.values():
        for e in events:
            if e["kind"] == "step" and e["at"] > since:
                found.setdefault(e["step"], {"digest": e["digest"]})[f"rank {e['rank']}"] = e["seen"]
    return {step: e for step, e in found.items() if len(e) == 3}
