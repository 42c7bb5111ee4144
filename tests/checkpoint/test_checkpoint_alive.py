"""Two live runs on one URL: the second is refused and named the first, and nobody waits for the dead."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.checkpoint import Fenced, Occupied
from everstep.checkpoint.format import wire
from everstep.checkpoint.format.layout import ALIVE, alive_name
from everstep.checkpoint.format.manifest import OpenRecord, Owner
from everstep.checkpoint.in_session import InSession
from everstep.checkpoint.log import alive
from everstep.checkpoint.log.alive import PATIENCE_SECONDS, QUIET_SECONDS, Process, wait_for_owner
from everstep.checkpoint.log.decisions import Claim
from everstep.checkpoint.ranks import Alone
from everstep.storage import MemoryStore

SCRIPT = """
import sys, everstep
run = everstep.Checkpointer(sys.argv[1])
state = {"step": 0}
print("restored", run.restore(state), flush=True)
for line in sys.stdin:
    try:
        print(type(run.save(int(line), {"step": int(line)}).wait(30)).__name__, flush=True)
    except everstep.checkpoint.Fenced:
        print("Fenced", flush=True)
run.close()
"""


class Run:
    """A run in a process of its own that has restored, and saves a step when it is told to."""

    def __init__(self, url: Path, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(url)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | environ,
        )  # fmt: skip
        assert self.heard().startswith("restored")
        until = time.monotonic() + 30
        while not list(url.glob(f"{ALIVE}*.json")):
            assert time.monotonic() < until
            time.sleep(0.01)

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def save(self, step: int) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        return self.heard()

    def end(self, how: int = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.wait(30)


@pytest.fixture
def run_in(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**environ: str) -> Run:
        runs.append(Run(tmp_path, **environ))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.end()


def restored(url: Path) -> int | None:
    with everstep.Checkpointer(str(url)) as run:
        return run.restore({"step": 0})


@pytest.mark.long
def test_run_on_the_url_of_a_living_one_is_refused_and_that_one_goes_on(
    run_in: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "QUIET_SECONDS", 60.0)  # a machine that does much else gives its sign late
    first = run_in()
    assert first.save(1) == "Committed"
    pid = first.process.pid
    with pytest.raises(Occupied, match=rf"process {pid} on .* has the log \(record 0.*another URL, or end that one"):
        restored(tmp_path)
    assert first.save(2) == "Committed"
    first.end()


@pytest.mark.long
def test_run_takes_over_from_a_killed_one_at_once(run_in: Callable[..., Run], tmp_path: Path, caplog: Any) -> None:
    first = run_in()
    assert first.save(1) == "Committed"
    first.end()
    assert restored(tmp_path) == 1
    assert "waiting" not in caplog.text
    assert list(tmp_path.glob(f"{ALIVE}*.json")) == [], "the next one's sweep, and its end in order, leave nothing"


def test_stopped_run_counts_as_dead_and_is_fenced_when_it_goes_on(
    run_in: Callable[..., Run], tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_in()
    assert first.save(1) == "Committed"
    first.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(alive, "QUIET_SECONDS", 1.0)
    assert restored(tmp_path) == 1
    assert f"process {first.process.pid} on" in caplog.text
    assert "waiting up to 1 s for a sign of life" in caplog.text
    first.process.send_signal(signal.SIGCONT)
    assert first.save(2) == "Fenced"


@pytest.mark.long
def test_same_job_never_waits_for_an_earlier_start_that_still_lives(
    run_in: Callable[..., Run], tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_in(EVERSTEP_JOB_UID="a", EVERSTEP_ROUND="1")
    monkeypatch.setenv("EVERSTEP_JOB_UID", "a")
    monkeypatch.setenv("EVERSTEP_ROUND", "2")
    assert restored(tmp_path) is None
    assert "waiting" not in caplog.text
    assert first.save(1) == "Fenced"


def test_process_takes_over_from_itself(tmp_path: Path, caplog: Any) -> None:
    first = everstep.Checkpointer(str(tmp_path))
    assert first.restore({"step": 0}) is None
    assert restored(tmp_path) is None
    assert "waiting" not in caplog.text
    with pytest.raises(Fenced):
        first.save(1, {"step": 1}).wait(30)


@pytest.mark.long
def test_world_that_goes_on_from_memory_asks_nobody(run_in: Callable[..., Run], tmp_path: Path, caplog: Any) -> None:
    """Its rendezvous was lost, and who has the log is a member that it left out."""
    left_out = run_in(EVERSTEP_RENDEZVOUS="before", EVERSTEP_ROUND="1")
    with everstep.Checkpointer(str(tmp_path)) as run:
        InSession(run).move(Alone(), 1, "after")
        run.save(1, {"step": 1}).wait(30)
    assert "waiting" not in caplog.text
    assert left_out.save(2) == "Fenced"


@pytest.mark.long
def test_run_that_begins_in_a_round_is_refused_too(
    run_in: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "QUIET_SECONDS", 60.0)
    run_in(EVERSTEP_RENDEZVOUS="one", EVERSTEP_ROUND="1")
    run = everstep.Checkpointer(str(tmp_path))
    InSession(run).move(Alone(), 1, "another")
    with pytest.raises(Occupied):
        run.restore({"step": 0})


ELSEWHERE = Process("node-7", "another machine", 41, "77")
OWNER = OpenRecord(3, "aa", 1, "", 1, "2026-11-25T00:00:00.000Z", (), -1, -1)
CLAIM = Claim("bb", 1, "", 1, "now")


class World:
    """A store with the sign of another machine's process, and a clock that only waiting moves."""

    def __init__(self, every: float | None, until: float = 1e9, gone: bool = True) -> None:
        self.store = MemoryStore()
        self.now = 0.0
        self.every, self.until, self.gone = every, until, gone
        self.beat(0)

    def beat(self, number: int) -> None:
        who = ELSEWHERE
        body: dict[str, wire.Json] = {
            "version": 1, "n": 3, "beat": number, "host": who.host, "machine": who.machine, "pid": who.pid,
            "started": who.started,
        }  # fmt: skip
        self.store.put(alive_name(3), wire.encode(body))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.until and self.gone:
            self.store.delete(alive_name(3))
        elif self.every is not None:
            self.beat(int(min(self.now, self.until) / self.every))

    def wait(self, claim: Claim = CLAIM, owner: OpenRecord | None = OWNER) -> float:
        wait_for_owner(self.store, lambda: owner, claim, clock=lambda: self.now, sleep=self.sleep)
        return self.now


def test_owner_on_another_machine_that_beats_is_alive_within_seconds() -> None:
    world = World(every=3)
    with pytest.raises(Occupied, match=r"process 41 on node-7 has the log .record 3, opened at 2026"):
        world.wait()
    assert world.now <= 3


def test_owner_without_a_sign_or_a_change_is_not_waited_for_longer_than_said() -> None:
    silent = World(every=None)
    assert QUIET_SECONDS <= silent.wait() <= QUIET_SECONDS + 0.5
    assert World(every=None).wait(owner=None) == 0
    old_release = World(every=3)
    old_release.store.delete(alive_name(3))
    assert old_release.wait() == 0
    damaged = World(every=None)
    damaged.store.objects[alive_name(3)] = b"{}"
    assert QUIET_SECONDS <= damaged.wait() <= QUIET_SECONDS + 0.5, "whoever lives writes it anew"


def test_job_waits_for_the_end_of_the_deleted_one_and_is_refused_by_one_that_stays() -> None:
    owner = replace(OWNER, job_uid="a", owners=(Owner("a", 1),))
    claim = replace(CLAIM, job_uid="b")
    assert 30 <= World(every=3, until=30).wait(claim, owner) < 32
    stays = World(every=3)
    with pytest.raises(Occupied, match="job a, process 41 on node-7"):
        stays.wait(claim, owner)
    assert stays.now <= PATIENCE_SECONDS + 1


@pytest.mark.parametrize(
    ("owner", "claim"),
    [
        (replace(OWNER, job_uid="a"), replace(CLAIM, job_uid="a")),
        (replace(OWNER, job_uid="a", rendezvous="x"), replace(CLAIM, job_uid="a", rendezvous="y")),
        (replace(OWNER, rendezvous="x"), replace(CLAIM, rendezvous="x")),
    ],
    ids=["job", "job with another rendezvous", "rendezvous"],
)
def test_own_run_is_never_waited_for(owner: OpenRecord, claim: Claim) -> None:
    assert World(every=3).wait(claim, owner) == 0
    with pytest.raises(Occupied):
        World(every=3).wait(replace(claim, job_uid="z", rendezvous="z"), owner)


@pytest.mark.long
def test_process_that_a_launcher_has_started_again_takes_the_log_of_one_that_hangs(tmp_path: Path) -> None:
    """Whose thread still writes signs: a rank 0 in a collective, cut off from its peers and not from the store."""
    hangs = Run(tmp_path)
    try:
        again = Run(tmp_path, TORCHELASTIC_RESTART_COUNT="1")
        try:
            assert again.save(1) == "Committed"
            assert hangs.save(2) == "Fenced"
        finally:
            again.process.kill()
            again.process.wait()
    finally:
        hangs.process.kill()
        hangs.process.wait()
