"""Recovery in process with FSDP2 over replicas × shards: a whole replica goes on, and who comes back gets its own shard
from its counterpart.

Real processes, gloo over loopback, two replicas of two shards, SIGKILL. `EVERSTEP_KILLS=50` for many.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everstep.contract import exit_codes
from support.processes.commits import newest_commit
from support.processes.ranks import Ranks
from support.processes.standstill import go_on
from support.processes.warm_python import warm
from support.recovery import sharded_script
from support.recovery.recovery_agents import Agents, Process
from support.recovery.sharded_script import Wanted, main

KILLS = int(os.environ.get("EVERSTEP_KILLS", "4"))
pytestmark = pytest.mark.timeout(180 + 15 * KILLS)

SCRIPT = str(sharded_script.__file__)

Play = Callable[..., Agents]
TENSOR = {"tensor": True, "width": 32}


@pytest.fixture
def job(play: Play) -> Callable[..., Agents]:
    """`job(…)`: four members of a job of that script, which train."""

    def start(count: int = 4, seed: int = 0, **wanted: Any) -> Agents:
        agents = play(Wanted(**wanted), seed, script=main)
        agents.begin(count)
        settled(agents)
        return agents

    return start


def settled(agents: Agents, steps: int = 2) -> None:
    agents.wait(agents.joined, "a member is not in the newest round")
    now = time.monotonic()
    agents.wait(lambda: agents.trained(agents.members, now, steps), "a member does not train")


def went_on(agents: Agents, p: Process, lost: int = 1) -> bool:
    """Whether it made each step once. Of steps whose last lines were lost with a peer it says nothing."""
    numbers = [e["step"] for e in agents.steps(p)]
    return numbers == sorted(set(numbers)) and numbers[-1] - numbers[0] + 1 - len(numbers) <= lost


def newcomer(agents: Agents, rank: int = 0) -> Process:
    found = agents.spawn(rank)
    agents.wait(lambda: agents.said(found, "ready"), "the new process did not get ready")
    return found


def lose(agents: Agents, victim: Process) -> tuple[float, Process]:
    """Kill a member; its replica's other member is left out of the round. When it was killed, and that member."""
    place = agents.members.index(victim)
    partner = agents.members[place ^ 1]
    at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    victim.process.join()
    agents.announce([p for p in agents.members if p not in (victim, partner)])
    return at, partner


def alone(agents: Agents, p: Process) -> list[dict[str, Any]]:
    """Its steps in a world of one replica; not the one that both were about to complete when a member was killed."""
    return [e for e in agents.steps(p) if e["world"] == 2]


def received(agents: Agents, p: Process) -> list[tuple[int, int, int]]:
    """Shard, giving rank and bytes of what the process has received so far."""
    found = re.findall(r"shard (\d+) from rank (\d+), (\d+) bytes", (agents.folder / f"{p.pid}.log").read_text())
    return [(int(shard), int(giver), int(size)) for shard, giver, size in found]


def whole_state(width: int) -> int:
    """Bytes of parameters and AdamW's state of the script's model."""
    elements = 24 * width + width + width * width + width + 3 * width + 3 + 2 * width
    return 3 * 4 * elements


@pytest.mark.long_but("tensor")
@pytest.mark.parametrize("wanted", [{}, TENSOR], ids=["fsdp", "tensor"])
def test_healthy_replica_goes_on_and_who_comes_back_gets_only_its_own_shard(
    job: Callable[..., Agents], wanted: dict[str, Any]
) -> None:
    agents = job(**wanted)
    _, _, *healthy = agents.members
    before = [p.pid for p in healthy]
    steps = [len(agents.steps(p)) for p in healthy]
    at, partner = lose(agents, agents.members[1])
    agents.wait(lambda: all(alone(agents, p) for p in healthy), "the healthy replica does not go on")
    took = max(alone(agents, p)[0]["at"] for p in healthy) - at
    print(f"kill -> first step of both survivors: {took * 1e3:.0f} ms")
    assert took < 20  # 0.1 on a machine that does nothing else
    settled(agents)
    assert [received(agents, p) for p in healthy] == [[], []]
    agents.announce([*healthy, partner, newcomer(agents)], whole=True)
    settled(agents)
    assert [p.pid for p in healthy] == before
    for p, count in zip(healthy, steps, strict=True):
        assert len(agents.steps(p)) > count
        assert went_on(agents, p)
        assert received(agents, p) == []
    (zero,), (one,) = received(agents, partner), received(agents, agents.members[3])
    assert (zero[:2], one[:2]) == ((0, 0), (1, 1)), "each from the member of the healthy replica that has its shard"
    # Its half of the state, and a few small tensors (step counters, the buffer).
    half = whole_state(wanted.get("width", 33)) / 2
    assert all(0.9 * half < size < 1.2 * half for size in (zero[2], one[2]))
    assert agents.differing() == {}


@pytest.mark.long
@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param({}, id="plain"),
        # What is sent to whom in it, the fixed deaths of this file have, and tests/ordinary/test_cut.py.
        pytest.param(TENSOR, id="tensor"),
        pytest.param({"halves": 0.005}, id="two-optimizers"),
        pytest.param({"reduced": True, "micro_batches": False}, id="bfloat16"),
    ],
)
def test_kills_at_random_moments_leave_replicas_equal(job: Callable[..., Agents], wanted: dict[str, Any]) -> None:
    agents = job(seed=len(wanted), **wanted)
    took = []
    for n in range(KILLS):
        time.sleep(agents.random.random() * 0.15)
        at, partner = lose(agents, agents.random.choice(agents.members))
        settled(agents)
        took.append(max(min(e["at"] for e in agents.steps(p) if e["at"] > at) for p in agents.members) - at)
        back = [partner, newcomer(agents)] if n % 2 else [newcomer(agents), newcomer(agents)]
        agents.announce([*agents.members, *back], whole=True)
        settled(agents)
    print("kill -> next step of both survivors, ms:", sorted(round(t * 1e3) for t in took))
    assert agents.differing() == {}
    assert all("no state is whole" not in agents.log(p) for p in agents.members)


@pytest.mark.long
def test_run_with_a_death_ends_with_the_bits_of_an_undisturbed_one(play: Play) -> None:
    ends = []
    for disturbed in (False, True):
        agents = play(Wanted(exact=True, steps=60, pause=0.005, slow_from=30), script=main)
        fresh = newcomer(agents)
        agents.begin(4)
        settled(agents)
        if disturbed:
            _, partner = lose(agents, agents.members[agents.random.randrange(4)])
            settled(agents)
            agents.announce([*agents.members, partner, fresh], whole=True)
            settled(agents)
        agents.hurry()
        agents.wait(lambda a=agents: all(_end(a, p) for p in a.members), "the run did not end")
        ends.append({(e["step"], e["shard"], e["digest"]) for e in (_end(agents, p) for p in agents.members)})
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]


def _end(agents: Agents, p: Process) -> Any:
    return next((e for e in p.events(agents.folder) if e["kind"] == "end"), None)


@pytest.mark.long
@pytest.mark.parametrize("deaf", [(2,), (2, 3)], ids=["one", "both"])
def test_member_that_voted_and_lost_the_answer_does_as_the_others_did(
    job: Callable[..., Agents], deaf: tuple[int, ...]
) -> None:
    # Of the survivors one has made the step, or none.
    agents = job(deaf_at=30, deaf=deaf)
    survivors = agents.members[2:]
    for rank in deaf:
        agents.wait(lambda p=agents.members[rank]: _deaf(agents, p), "the vote was not lost")
    lose(agents, agents.members[0])
    settled(agents)
    assert all(went_on(agents, p) for p in survivors)
    assert ("was made by others" in agents.log(agents.members[0])) == (len(deaf) == 1)
    # The script's steps end with a collective of its own, so that the vote comes behind them.
    assert "copied when a step begins" in agents.log(agents.members[0])
    # The newcomers' replica has the same bits from then on.
    agents.announce([*survivors, newcomer(agents), newcomer(agents)], whole=True)
    settled(agents)
    assert agents.differing() == {}


def _deaf(agents: Agents, p: Process) -> bool:
    return any(e["kind"] == "deaf" for e in p.events(agents.folder))


@pytest.mark.long
@pytest.mark.parametrize("wanted", [pytest.param({}, id="fsdp"), pytest.param(TENSOR, id="tensor")])
def test_shards_left_of_two_broken_replicas_make_a_whole_one(
    job: Callable[..., Agents], wanted: dict[str, Any]
) -> None:
    agents = job(**wanted)
    a, b, c, d = agents.members
    for p in (b, c):
        os.kill(p.pid, signal.SIGKILL)
    agents.announce([a, d])
    settled(agents)
    for p in (a, d):
        assert went_on(agents, p)
        assert received(agents, p) == []


@pytest.mark.long
def test_no_replica_whole_restores_the_newest_commit_in_the_same_processes(
    job: Callable[..., Agents], tmp_path: Path
) -> None:
    agents = job(url=str(tmp_path / "c"), every_steps=20, exact=True, pause=0.005)
    a, b, c, d = agents.members
    agents.wait(lambda: newest_commit(tmp_path / "c") >= 40, "no commits")

    def between() -> bool:
        return agents.steps(a)[-1]["step"] % 20 in range(5, 15)

    agents.wait(lambda: between() and agents.stand_when(between), "no step between two commits")
    newest = newest_commit(tmp_path / "c")
    for p in (b, d):  # both that hold shard 1
        os.kill(p.pid, signal.SIGKILL)
    go_on([a.pid, c.pid])
    agents.announce([a, c])
    settled(agents, 30)
    for p in (a, c):
        numbers = [e["step"] for e in agents.steps(p)]
        (back,) = [i for i, (x, y) in enumerate(pairwise(numbers)) if y <= x]
        assert numbers[back + 1] % 20 == 1, "training goes on after a commit"
        assert numbers[back + 1] > newest
    before = agents.steps(a)[-1]["step"]
    agents.wait(lambda: newest_commit(tmp_path / "c") > before, "no commit of one replica")
    # Rank 1 has another shard than before.
    assert {e["shard"] for e in agents.steps(c)} == {0, 1}
    agents.announce([a, c, newcomer(agents), newcomer(agents)], whole=True)
    settled(agents)
    before = agents.steps(a)[-1]["step"]
    agents.wait(lambda: newest_commit(tmp_path / "c") > before, "no commit of two replicas")
    # Steps that were made twice have the same bits, too.
    assert agents.differing() == {}


@pytest.mark.long
def test_member_that_becomes_another_shard_of_a_commit_is_cut_anew(job: Callable[..., Agents], tmp_path: Path) -> None:
    # One of the model's layers has three rows, of which shard 0 has two.
    agents = job(url=str(tmp_path / "c"), every_steps=20, pause=0.005, **TENSOR)
    a, b, c, d = agents.members
    agents.wait(lambda: newest_commit(tmp_path / "c") >= 20, "no commits")
    for p in (b, d):
        os.kill(p.pid, signal.SIGKILL)
    agents.announce([a, c])
    settled(agents)
    assert [{e["shard"] for e in agents.steps(p)} for p in (a, c)] == [{0}, {0, 1}]
    assert "no state is whole" in agents.log(c)
    before = agents.steps(a)[-1]["step"]
    agents.wait(lambda: newest_commit(tmp_path / "c") > before, "no commit of one replica")
    agents.announce([a, c, newcomer(agents), newcomer(agents)], whole=True)
    settled(agents)
    agents.announce([*agents.members[2:], newcomer(agents), newcomer(agents)], whole=True)
    settled(agents)
    alike: dict[tuple[int, int], set[str]] = {}
    for p in agents.members:
        for e in agents.steps(p):
            alike.setdefault((e["step"], e["shard"]), set()).add(e["digest"])
    assert alike
    assert all(len(digests) == 1 for digests in alike.values())


@pytest.mark.long
def test_no_replica_whole_and_no_commit_ends_the_processes_and_says_why(job: Callable[..., Agents]) -> None:
    agents = job()
    a, b, c, d = agents.members
    for p in (b, d):
        os.kill(p.pid, signal.SIGKILL)
    agents.announce([a, c])
    for p in (a, c):
        p.process.join(30)
        assert p.process.exitcode == exit_codes.NOT_RECOVERED
        assert "shards (1,) of 2 are lost, and there is no commit" in agents.log(p)


@pytest.mark.long
def test_killed_in_every_phase_of_a_return(job: Callable[..., Agents]) -> None:
    # Case 46: a newcomer, or a member of the healthy replica's counterpart, dies so soon after a round was announced.
    agents = job()
    for milliseconds in (0, 5, 15, 40):
        for victim in (2, 3):
            _, partner = lose(agents, agents.members[0])
            settled(agents, 1)
            agents.announce([*agents.members, newcomer(agents), partner], whole=True)
            time.sleep(milliseconds / 1000)
            _, partner = lose(agents, agents.members[victim])
            settled(agents, 1)
            agents.announce([*agents.members, newcomer(agents), partner], whole=True)
            settled(agents, 1)
    assert agents.differing() == {}


@pytest.mark.long
def test_giver_killed_during_the_transfer_and_the_other_replica_gives(job: Callable[..., Agents]) -> None:
    agents = job(count=4, width=1200)  # 19 MB a shard
    _, partner = lose(agents, agents.members[0])
    settled(agents, 1)
    healthy = list(agents.members)
    agents.announce([*healthy, newcomer(agents), newcomer(agents)], whole=True)
    settled(agents, 1)
    # Three replicas now; the first, which gives, dies while the third receives.
    third = [newcomer(agents), partner]
    agents.announce([*agents.members, *third], whole=True)
    time.sleep(0.03 + 0.05 * agents.random.random())
    lose(agents, healthy[0])
    settled(agents, 1)
    assert len(agents.members) == 4
    assert agents.differing() == {}


@pytest.mark.long
def test_world_of_no_whole_replicas_waits_for_the_missing_member_and_loses_no_step(job: Callable[..., Agents]) -> None:
    agents = job()
    _, *left = agents.members
    agents.kill(agents.members[0])  # a round of three
    agents.wait(agents.joined, "a member does not answer")
    counts = [len(agents.steps(p)) for p in left]
    fresh = newcomer(agents)
    assert [len(agents.steps(p)) for p in left] == counts, "a step was taken by three"
    agents.announce([fresh, *left])
    settled(agents)
    for p in left:
        assert went_on(agents, p)
        assert received(agents, p) == []
    assert [r[:2] for r in received(agents, fresh)] == [(0, 2)]
    assert agents.differing() == {}


@pytest.mark.long
def test_replicas_begin_alike_though_each_process_drew_other_first_values(job: Callable[..., Agents]) -> None:
    agents = job(first=None)
    assert agents.differing() == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("foreign", "error", "said"),
    [("mesh", "LoopError", "DeviceMesh"), ("fsdp1", "NotRecoverable", "FullyShardedDataParallel")],
)
def test_state_that_is_sharded_otherwise_is_refused_before_the_first_step(
    play: Play, foreign: str, error: str, said: str
) -> None:
    # Taken for replicated it would be trained wrong without an error.
    agents = play(Wanted(foreign=foreign, micro_batches=False), script=main)
    p = agents.spawn()
    p.process.join(60)
    assert p.process.exitcode == 1
    assert error in agents.log(p)
    assert said in agents.log(p)
    assert "run.mesh(shard=N)" in agents.log(p)


def without_agent(folder: Path, ranks: int, wanted: Wanted) -> tuple[list[int], str]:
    """By `python`, or as torchrun would: the exit codes by rank, and what was said."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_", "RANK", "WORLD_SIZE"))}
    started = Ranks(warm(), ranks, (SCRIPT, json.dumps(wanted.__dict__)), folder / "log", variables)
    try:
        codes = started.wait(120)
    finally:
        started.kill()
    return codes, (folder / "log").read_text()


@pytest.mark.long_but("torchrun-2")
@pytest.mark.parametrize(("launcher", "shards"), [("python", 1), ("torchrun", 2)])
def test_script_trains_alike_where_no_peer_may_be_lost(tmp_path: Path, launcher: str, shards: int) -> None:
    wanted = Wanted(steps=12, exact=True, out=str(tmp_path))
    codes, log = without_agent(tmp_path, shards if launcher == "torchrun" else 0, wanted)
    assert codes == [0] * shards, log[-3000:]
    ends = [e for path in tmp_path.glob("*.jsonl") for e in map(json.loads, path.read_text().splitlines())
            if e["kind"] == "end"]  # fmt: skip
    assert [e["step"] for e in ends] == [12] * shards


@pytest.mark.long
def test_world_that_is_no_whole_replicas_is_refused_where_it_cannot_change(tmp_path: Path) -> None:
    wanted = Wanted(steps=2, shard=3, out=str(tmp_path))
    codes, log = without_agent(tmp_path, 2, wanted)
    assert 0 not in codes
    assert "mesh(shard=3): 2 processes are no whole replicas" in log
