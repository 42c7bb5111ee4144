"""The commit log belongs to the world that its round says: an older world cannot take it, and a newer one always can.

Real processes, over a store whose calls wait while a file says so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.checkpoint import Catalog
from everstep.checkpoint.format.manifest import CommitRecord, OpenRecord
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.storage import open_store
from support.recovery.held_store import Hold
from support.recovery.recovery_agents import Agents, Process
from support.recovery.recovery_script import Wanted

pytestmark = pytest.mark.timeout(180)

Play = Callable[..., Agents]
JOB = {"EVERSTEP_JOB_UID": "uid-1", "EVERSTEP_JOB_CREATED": "1795262400", "EVERSTEP_POD_NAME": "w0-0"}
# Of a TrainingJob the operator counts the rounds, with etcd and outside of Kubernetes the rendezvous does.
COUNTED = pytest.mark.parametrize(
    ("job", "rendezvous"),
    [
        pytest.param(JOB, "", id="operator"),
        pytest.param(JOB, "a-7f", id="etcd"),
        pytest.param({}, "a-7f", id="no-kubernetes"),
    ],
)


def opened(folder: Path) -> list[int]:
    """The rounds of the open records, oldest first."""
    if not (folder / "c" / "log").exists():
        return []
    log = CommitLog(open_store(str(folder / "c")))
    records = [log.read(n) for n in range(log.head().last + 1)]
    return [r.round for r in records if isinstance(r, OpenRecord)]


def commits(folder: Path) -> list[int]:
    """Steps of the commits, newest first."""
    if not (folder / "c" / "log").exists():
        return []
    return [found.step for found in Catalog(open_store(str(folder / "c"))).list()]


def trains(agents: Agents) -> None:
    agents.wait(agents.joined, "a member is not in the newest round")
    before = {p.number: len(agents.steps(p)) for p in agents.members}
    agents.wait(
        lambda: all(len(agents.steps(p)) >= before[p.number] + 2 for p in agents.members), "a member does not train"
    )


def new(agents: Agents, *, told: int | None = None) -> Process:
    found = agents.spawn(told=told)
    agents.wait(lambda: agents.said(found, "ready"), "a process does not get ready")
    return found


@pytest.mark.long
@COUNTED
def test_rank_0_that_sleeps_while_it_takes_the_log_cannot_take_it_from_the_world_after_it(
    play: Play, tmp_path: Path, job: dict[str, str], rendezvous: str
) -> None:
    hold = Hold(tmp_path)
    wanted = Wanted(url=str(tmp_path / "c"), every_steps=10, hold=str(hold.file), workers=0, pause=0.01)
    agents = play(wanted, rendezvous=rendezvous)
    agents.job = job
    agents.begin(3)
    agents.wait(lambda: bool(commits(tmp_path)), "no commit")
    sleeper, other, leaver = agents.members
    hold.set((sleeper.pid, r"create log/"))
    agents.announce([sleeper, other])
    agents.over(leaver, "evicted")
    agents.wait(lambda: hold.waits(sleeper.pid), "rank 0 does not take the log in its new round")
    newest = commits(tmp_path)[0]
    agents.announce([other, new(agents, told=2)])
    agents.wait(lambda: commits(tmp_path)[0] > newest, "the world after it does not save")
    assert opened(tmp_path) == [1, 3]
    hold.set()
    agents.wait(lambda: hold.went(sleeper.pid), "rank 0 has not tried to take the log")
    agents.over(sleeper, "evicted")
    sleeper.process.join(60)
    newest = commits(tmp_path)[0]
    agents.wait(lambda: commits(tmp_path)[0] > newest + 10, "the world after it saves no more")
    assert opened(tmp_path) == [1, 3]
    assert agents.differing() == {}


@pytest.mark.long_but("no-kubernetes")
@COUNTED
def test_job_of_which_nothing_is_left_goes_on_in_its_next_round(
    play: Play, tmp_path: Path, job: dict[str, str], rendezvous: str
) -> None:
    """After a suspend, say: the processes are new and were started before their first round, the count goes on."""
    wanted = Wanted(url=str(tmp_path / "c"), every_steps=5, workers=0, pause=0.01)
    agents = play(wanted, rendezvous=rendezvous)
    agents.job = job
    agents.begin(2)
    for _ in range(3):  # rounds that form in the processes, and processes that are started between them
        trains(agents)
        victim = agents.members[0]
        agents.kill(victim)
        agents.announce([*agents.members, new(agents, told=agents.round)])
    trains(agents)
    last = agents.round
    newest = commits(tmp_path)[0]
    agents.wait(lambda: commits(tmp_path)[0] > newest, "the last world does not save")
    assert opened(tmp_path)[-1] == last
    for again in range(2):
        for p in agents.members:
            os.kill(p.pid, signal.SIGKILL)
            p.process.join()
        newest = commits(tmp_path)[0]
        agents.members = []
        agents.announce([new(agents), new(agents)])
        agents.wait(lambda n=newest: commits(tmp_path)[0] > n, f"the job does not go on ({again})")  # type: ignore[misc]
        assert opened(tmp_path)[-1] == last + 1 + again
        assert all(e["step"] == newest for p in agents.members for e in p.events(tmp_path) if e["kind"] == "from")


@pytest.mark.long
def test_run_whose_rendezvous_was_lost_with_all_its_processes_goes_on_in_a_new_one(play: Play, tmp_path: Path) -> None:
    wanted = Wanted(url=str(tmp_path / "c"), every_steps=5, workers=0, pause=0.01)
    first = play(wanted, rendezvous="a-1")
    first.begin(2)
    for _ in range(2):
        trains(first)
        first.announce(first.members)
    trains(first)
    first.wait(lambda: opened(tmp_path)[-1:] == [3] and bool(commits(tmp_path)), "the third round does not save")
    first.__exit__()
    newest = commits(tmp_path)[0]
    again = play(wanted, rendezvous="b-1")
    again.begin(2)
    again.wait(lambda: commits(tmp_path)[0] > newest, "the run does not go on")
    assert opened(tmp_path)[-1] == 1


def steps_in_the_log(folder: Path) -> list[int]:
    """Of the commits, in the order in which they were appended, those without data included."""
    if not (folder / "c" / "log").exists():
        return []
    log = CommitLog(open_store(str(folder / "c")))
    records = [log.read(n) for n in range(log.head().last + 1)]
    return [r.step for r in records if isinstance(r, CommitRecord)]


def one_of_two_left_out(play: Play, tmp_path: Path, hold: Hold) -> tuple[Agents, Process, Process]:
    """Who goes on, and who waits for a round of its own."""
    wanted = Wanted(url=str(tmp_path / "c"), every_steps=10, hold=str(hold.file), workers=0, pause=0.02)
    agents = play(wanted)
    agents.begin(2)
    agents.wait(lambda: steps_in_the_log(tmp_path) == [10], "no commit")
    stays, left_out = agents.members
    return agents, stays, left_out


@pytest.mark.long
def test_commit_of_a_world_that_is_cut_off_after_the_next_one_has_looked_is_not_gone_behind(
    play: Play, tmp_path: Path
) -> None:
    """The next world has not taken the log yet: what an older one commits until then is what it has to restore."""
    hold = Hold(tmp_path)
    agents, cut_off, left_out = one_of_two_left_out(play, tmp_path, hold)
    hold.set((cut_off.pid, r"(put|create|start|part|commit) data/"))
    agents.announce([cut_off])
    agents.wait(lambda: bool(agents.steps(cut_off)) and agents.steps(cut_off)[-1]["step"] >= 40, "one does not go on")
    held = agents.steps(left_out)[-1]["step"]
    agents.announce([left_out])  # of which the other hears nothing
    agents.wait(lambda: agents.joined() and agents.steps(left_out)[-1]["step"] > held, "the other does not train")
    os.kill(left_out.pid, signal.SIGSTOP)
    hold.set()
    agents.wait(lambda: steps_in_the_log(tmp_path)[-1] >= 60, "the one that is cut off does not commit")
    os.kill(left_out.pid, signal.SIGCONT)
    newest = steps_in_the_log(tmp_path)[-1]
    agents.wait(lambda: steps_in_the_log(tmp_path)[-1] > newest + 10, "the newest world does not commit")
    assert steps_in_the_log(tmp_path) == sorted(steps_in_the_log(tmp_path))
    assert opened(tmp_path)[-1] == 3


@pytest.mark.long
def test_members_that_come_back_while_the_store_is_slow_commit_nothing_behind_what_others_had(
    play: Play, tmp_path: Path
) -> None:
    hold = Hold(tmp_path)
    agents, gone, left_out = one_of_two_left_out(play, tmp_path, hold)
    agents.announce([gone])
    agents.wait(lambda: steps_in_the_log(tmp_path)[-1] >= 60, "one does not go on")
    os.kill(gone.pid, signal.SIGKILL)
    gone.process.join()
    newest = steps_in_the_log(tmp_path)[-1]
    hold.set((left_out.pid, r".*"))  # it asks what is committed, and is not answered
    agents.announce([left_out])
    agents.wait(agents.joined, "it does not go on without the store")
    hold.set()
    agents.wait(lambda: steps_in_the_log(tmp_path)[-1] > newest, "it does not commit")
    assert steps_in_the_log(tmp_path) == sorted(steps_in_the_log(tmp_path))


@pytest.mark.long
def test_member_of_a_lost_rendezvous_looks_at_what_was_committed_in_rounds_of_another(
    play: Play, tmp_path: Path
) -> None:
    hold = Hold(tmp_path)
    agents, gone, stopped = one_of_two_left_out(play, tmp_path, hold)
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(gone.pid, signal.SIGKILL)
    gone.process.join()
    agents.members = []
    other = new(agents)
    agents.rendezvous, agents.round = "another", 0
    agents.announce([other])
    agents.wait(lambda: steps_in_the_log(tmp_path)[-1] >= 60, "the new one does not train")
    os.kill(other.pid, signal.SIGKILL)
    other.process.join()
    newest = steps_in_the_log(tmp_path)[-1]
    agents.members = [stopped]
    agents.announce([stopped])
    os.kill(stopped.pid, signal.SIGCONT)
    agents.wait(lambda: steps_in_the_log(tmp_path)[-1] > newest, "it does not commit")
    assert steps_in_the_log(tmp_path) == sorted(steps_in_the_log(tmp_path))
