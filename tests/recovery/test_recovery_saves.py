"""Deaths while a commit is written or read: what was saved stays true, and nobody waits for the dead.

Real processes, over a store whose calls wait while a file says so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import Catalog
from everstep.storage import open_store
from support.recovery.held_store import Hold
from support.recovery.recovery_agents import Agents, Process
from support.recovery.recovery_script import Wanted

pytestmark = pytest.mark.timeout(180)

Play = Callable[..., Agents]


def commits(folder: Path) -> list[int]:
    """Steps of the commits, newest first."""
    if not (folder / "c" / "log").exists():
        return []
    return [found.step for found in Catalog(open_store(str(folder / "c"))).list()]


def written(folder: Path, open_n: int, rank: int) -> bool:
    """Whether this rank's part of a save of that writer is written."""
    return any(folder.glob(f"c/data/{open_n:012d}-*/{rank:05d}.json"))


def event(agents: Agents, p: Process, kind: str) -> Any:
    return next((e for e in p.events(agents.folder) if e["kind"] == kind), None)


def trains(agents: Agents) -> None:
    agents.wait(agents.joined, "a member is not in the newest round")
    now = time.monotonic()
    agents.wait(lambda: agents.trained(agents.members, now, 2), "a member does not train")


def test_kill_in_the_last_save_ends_well_in_seconds_with_a_commit_of_the_last_step(play: Play, tmp_path: Path) -> None:
    hold = Hold(tmp_path)
    agents = play(Wanted(steps=30, url=str(tmp_path / "c"), hold=str(hold.file), workers=0, pause=0.01))
    members = agents.get_ready(3)
    victim = members[1]
    hold.set((victim.pid, r"put data/"))
    agents.announce(members)
    agents.wait(lambda: written(tmp_path, 0, 0) and hold.waits(victim.pid), "no last save")
    assert not any(event(agents, p, "end") for p in agents.members), "rank 0 waits for the part of rank 1"
    killed = agents.kill(victim)
    agents.wait(lambda: all(event(agents, p, "end") for p in agents.members), "the run does not end")
    ends = [event(agents, p, "end") for p in agents.members]
    print(f"ended {max(e['at'] for e in ends) - killed:.2f} s after the kill")
    assert [e["step"] for e in ends] == [30, 30]
    assert len({e["digest"] for e in ends}) == 1
    assert commits(tmp_path) == [30]


def test_loss_after_the_checkpoints_folder_is_gone_costs_saves_and_no_training(play: Play, tmp_path: Path) -> None:
    # Case 80, second half. A new world takes the log before its first save.
    agents = play(Wanted(url=str(tmp_path / "c"), every_steps=20, workers=0, pause=0.01))
    agents.begin(3)
    agents.wait(lambda: commits(tmp_path) != [], "no commit")
    (tmp_path / "c").rename(tmp_path / "away")
    victim = agents.members[1]
    agents.kill(victim)
    agents.announce([p for p in agents.members if p is not victim])
    trains(agents)
    agents.wait(lambda: all("this folder was there, and is gone" in agents.log(p) for p in agents.members), "no word")
    assert all("Training goes on" in agents.log(p) for p in agents.members)
    trains(agents)
    (tmp_path / "away").rename(tmp_path / "c")
    newest = commits(tmp_path)[0]
    agents.wait(lambda: commits(tmp_path)[0] > newest, "nothing is saved, though the folder is back")


def stopped_in_a_save(play: Play, tmp_path: Path) -> tuple[Agents, Hold, Process]:
    """Rank 0 is stopped while the save of step 20 waits for rank 1's part, and the others go on without it."""
    hold = Hold(tmp_path)
    agents = play(Wanted(url=str(tmp_path / "c"), every_steps=20, hold=str(hold.file), workers=0, pause=0.01))
    stopped, *others = agents.get_ready(3)
    part = (others[0].pid, r"put data/0{12}-")
    hold.set(part)
    agents.announce([stopped, *others])
    agents.wait(lambda: written(tmp_path, 0, 0) and hold.waits(others[0].pid), "no save")
    os.kill(stopped.pid, signal.SIGSTOP)
    hold.set(part, *((p.pid, r"create log/") for p in others))
    agents.announce(others)
    agents.wait(agents.joined, "the others do not go on")
    return agents, hold, stopped


@pytest.mark.long
def test_rank_0_that_wakes_with_a_save_in_flight_commits_a_step_that_the_others_have_been_at(
    play: Play, tmp_path: Path
) -> None:
    agents, hold, woken = stopped_in_a_save(play, tmp_path)
    assert commits(tmp_path) == []
    others = agents.members
    hold.set(*((p.pid, r"create log/") for p in others))  # they have not taken the log yet
    os.kill(woken.pid, signal.SIGCONT)
    agents.wait(lambda: commits(tmp_path) == [20], "rank 0's save did not end")
    passed = {e["digest"] for p in others for e in agents.steps(p) if e["step"] == 20}
    agents.__exit__()
    # If all die now, what is restored is what the survivors were at, and went on from.
    again = play(Wanted(url=str(tmp_path / "c"), every_steps=20, workers=0))
    again.begin(2)
    trains(again)
    found = event(again, again.members[0], "from")
    assert found["step"] == 20
    assert {found["digest"]} == passed


def test_rank_0_that_wakes_after_the_others_have_saved_commits_nothing(play: Play, tmp_path: Path) -> None:
    agents, hold, woken = stopped_in_a_save(play, tmp_path)
    others = agents.members
    # The others take its parts away before they save. So it is to have all of them before the others take the log.
    commits_late = (woken.pid, r"create log/")
    hold.set(commits_late, *((p.pid, r"create log/") for p in others))
    os.kill(woken.pid, signal.SIGCONT)
    agents.wait(lambda: hold.waits(woken.pid), "rank 0 does not want to commit")
    os.kill(woken.pid, signal.SIGSTOP)
    hold.set(commits_late)
    agents.wait(lambda: len(commits(tmp_path)) >= 1, "the others do not save")
    os.kill(woken.pid, signal.SIGCONT)
    hold.set()
    agents.wait(lambda: hold.went(woken.pid), "rank 0 has not tried to commit")
    agents.over(woken, "evicted")
    woken.process.join(30)
    assert woken.process.exitcode == 1
    assert 20 not in commits(tmp_path)
    trains(agents)
    assert agents.differing() == {}


@pytest.mark.long
def test_peers_killed_while_a_commit_is_loaded_do_not_make_it_poison(play: Play, tmp_path: Path) -> None:
    """Case 76's bound counts runs that came to nothing, not those whose peers were killed."""
    hold = Hold(tmp_path)
    wanted = Wanted(url=str(tmp_path / "c"), every_steps=10, hold=str(hold.file), workers=0, pause=0.01)
    first = play(wanted)
    first.begin(2)
    first.wait(lambda: len(commits(tmp_path)) >= 2, "no commits")
    first.__exit__()
    newest = commits(tmp_path)[0]
    agents = play(wanted)
    stays, victim = agents.spawn(), agents.spawn()
    agents.wait(lambda: all(agents.said(p, "ready") for p in (stays, victim)), "not ready")
    for _ in range(3):
        hold.set((victim.pid, r"get_into data/"))
        agents.announce([stays, victim])
        agents.wait(lambda v=victim: hold.waits(v.pid), "rank 1 does not load")  # type: ignore[misc]
        assert any(tmp_path.glob("c/loads/*/*")), "rank 0 has said that it loads"
        os.kill(victim.pid, signal.SIGKILL)
        victim.process.join()
        agents.members = [stays]
        victim = agents.spawn()
        agents.wait(lambda v=victim: agents.said(v, "ready"), "not ready")  # type: ignore[misc]
    hold.set()
    agents.announce([stays, victim])
    trains(agents)
    assert [event(agents, p, "from")["step"] for p in (stays, victim)] == [newest, newest]


@pytest.mark.long
def test_member_that_was_left_out_does_not_take_the_others_back_behind_what_they_have_committed(
    play: Play, tmp_path: Path
) -> None:
    """It holds an old state, and those that went on and saved are all gone: the commit is newer than what is left."""
    agents = play(Wanted(url=str(tmp_path / "c"), every_steps=10, workers=0, pause=0.01))
    agents.begin(3)
    trains(agents)
    left_out, *others = agents.members
    agents.announce(others)  # its collectives fail, and it waits for a round of its own
    trains(agents)
    held = agents.steps(left_out)[-1]["step"]
    agents.wait(lambda: (commits(tmp_path) or [0])[0] > held + 20, "the others do not save")
    for p in others:
        os.kill(p.pid, signal.SIGKILL)
        p.process.join()
    newest = commits(tmp_path)[0]
    agents.members = [left_out]
    new = agents.spawn()
    agents.wait(lambda: agents.said(new, "ready"), "not ready")
    agents.announce([left_out, new])
    trains(agents)
    after = [e["step"] for p in agents.members for e in agents.steps(p) if e["world"] == 2]
    assert min(after) == newest + 1
    assert agents.differing() == {}
