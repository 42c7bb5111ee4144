"""What a process hears of rounds from its agent's socket."""

import gc
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.utils.data import DataLoader

from everstep.contract.calls import Call
from everstep.recovery.announcements import AnnouncedRound, Announcements, Drained, RoundsOver
from everstep.recovery.current_round import BackgroundForming
from everstep.recovery.ddp.reducers import Reducers
from everstep.recovery.engine import Recovery
from everstep.recovery.forming import forming
from everstep.recovery.group.in_flight import CollectiveWork, PeerLost
from everstep.recovery.validity import Validity


class Agent:
    """The other end."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "agent")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(1)

    def accept(self) -> None:
        self.connection, _ = self._listening.accept()
        self._lines = self.connection.makefile("rb")

    def say(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.readline())
        return found


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


@pytest.fixture
def rounds(agent: Agent) -> Announcements:
    found = Announcements.find({"EVERSTEP_AGENT_SOCKET": agent.path})
    assert found is not None
    agent.accept()
    assert agent.hear()["kind"] == "hello"
    return found


def announce(agent: Agent, number: int, **fields: Any) -> None:
    agent.say(kind="round", round=number, rank=1, world_size=3, store=["10.0.0.1", 4000], **fields)


def test_without_an_agent_there_are_no_rounds() -> None:
    assert Announcements.find({}) is None


def test_round_is_heard_whether_it_came_before_or_after_it_was_asked_for(agent: Agent, rounds: Announcements) -> None:
    announce(agent, 4)
    assert rounds.wait_newer(3, 10) == AnnouncedRound(4, 1, 3, ("10.0.0.1", 4000))
    threading.Timer(0.05, announce, (agent, 5)).start()
    assert rounds.wait_newer(4, 10).number == 5


def test_older_round_is_never_seen_again(agent: Agent, rounds: Announcements) -> None:
    heard: list[tuple[int, bool]] = []
    rounds.on_round(lambda r, whole: heard.append((r.number, whole)))
    for number in (4, 3, 4, 5):
        announce(agent, number, whole=number == 5)
    assert rounds.wait_newer(4, 10).number == 5
    announce(agent, 6)
    rounds.wait_newer(5, 10)
    agent.say(kind="over")
    with pytest.raises(RoundsOver):
        rounds.wait_newer(6, 10)
    assert heard == [(4, False), (5, True), (6, False)]


def test_message_of_a_newer_agent_is_passed_over(agent: Agent, rounds: Announcements) -> None:
    agent.say(kind="something")
    announce(agent, 4, more=True)
    assert rounds.wait_newer(0, 10).number == 4


def test_waiting_ends_when_no_round_comes_or_none_will(agent: Agent, rounds: Announcements) -> None:
    with pytest.raises(RoundsOver, match=r"no round above 0 within 0\.01 s"):
        rounds.wait_newer(0, 0.01)
    agent.say(kind="over", reason="this member was evicted")
    with pytest.raises(RoundsOver, match="evicted"):
        rounds.wait_newer(0, 10)


@pytest.mark.parametrize("last", [b"", b"no json\n", b'{"kind": "round", "round": 1}\n'])
def test_agent_that_is_gone_or_cannot_be_read_ends_the_waiting(
    agent: Agent, rounds: Announcements, last: bytes
) -> None:
    agent.connection.sendall(last)
    agent.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RoundsOver, match="the agent"):
        rounds.wait_newer(0, 10)
    rounds.ready()  # says so to nobody


def test_agent_is_told_what_the_process_does(agent: Agent, rounds: Announcements) -> None:
    rounds.ready()
    rounds.broken(4, "x" * 1000, (Call(7, "barrier()"),), " at train.py:31 in main")
    rounds.joined(5, 17, 0.25, 0.5, "state from rank 1")
    assert agent.hear() == {"kind": "ready"}
    calls = {"recent": [[7, "barrier()"]], "at": " at train.py:31 in main"}
    assert agent.hear() == {"kind": "broken", "round": 4, "reason": "x" * 500, **calls}
    took = {"formed": 0.25, "settled": 0.5, "how": "state from rank 1"}
    assert agent.hear() == {"kind": "joined", "round": 5, "step": 17, **took}


@pytest.mark.parametrize("validity", [Validity.NONE, Validity.WHOLE])
def test_process_waits_in_its_memory_for_as_long_as_a_replacement_may_take(validity: Validity) -> None:
    """`spec.elastic.shrinkAfterSeconds` may be a day; and in a job of a fixed size nobody trains until one has come."""

    class Later(Announcements):
        def __init__(self) -> None:
            """Nothing is announced for a day."""

        def wait_newer(self, than: int, seconds: float) -> AnnouncedRound:
            if seconds < 86_400:
                raise RoundsOver(f"no round above {than} within {seconds:g} s")
            raise Drained("a day is over")

    with pytest.raises(Drained):
        Recovery(Later()).enter(7, validity, lambda: None, lambda: None)


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_heard_late_of_the_round_at_hand_changes_nothing(
    agent: Agent, rounds: Announcements, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hears of rounds may have no processor between waking the training thread and telling of one."""
    goes_on, heard = threading.Event(), threading.Semaphore(0)
    listen = rounds.on_round

    def late(call: Any) -> None:
        def told(round_: AnnouncedRound, whole: bool) -> None:
            assert goes_on.wait(30)
            call(round_, whole)
            heard.release()

        listen(told)

    monkeypatch.setattr(rounds, "on_round", late)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def announce_one(number: int) -> None:
        place = ["127.0.0.1", store.port]
        agent.say(kind="round", round=number, rank=0, world_size=1, store=place, whole=whole and number > 0)

    def enter(step: int, validity: Validity) -> None:
        recovery.enter(step, validity, lambda: None, lambda: None)

    recovery = Recovery(rounds)
    recovery.main.attach(forming.alone(), 0, 1)
    state: dict[str, Any] = {"w": torch.zeros(2)}
    recovery.track(state, Reducers(state))
    goes_on.set()
    announce_one(0)
    enter(0, Validity.NONE)
    assert heard.acquire(timeout=30)
    goes_on.clear()
    announce_one(1)
    enter(3, Validity.WHOLE)
    goes_on.set()
    assert heard.acquire(timeout=30)
    assert recovery.round.announced is not None
    assert recovery.round.announced.number == 1
    assert recovery.round.lost is None
    assert not recovery.round.boundary_wanted
    announce_one(2)
    assert heard.acquire(timeout=30)
    assert (recovery.round.lost is None) is whole, "the next one is waited for in the middle of a step, or ends it"
    if whole:
        eventually(lambda: recovery.round.boundary_wanted)
    recovery.part()


def test_failure_of_an_old_round_that_is_told_late_leaves_the_next_one_alone(
    agent: Agent, rounds: Announcements
) -> None:
    """A thread of gloo may have no processor between waking the training thread and telling of the failure."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def enter(number: int) -> None:
        agent.say(kind="round", round=number, rank=0, world_size=1, store=["127.0.0.1", store.port], whole=False)
        recovery.enter(number, Validity.WHOLE if number else Validity.NONE, lambda: None, lambda: None)

    recovery = Recovery(rounds)
    recovery.main.attach(forming.alone(), 0, 1)
    state: dict[str, Any] = {"w": torch.zeros(2)}
    recovery.track(state, Reducers(state))
    enter(0)
    in_flight = recovery.main._in_flight
    goes_on, tell = threading.Event(), in_flight._on_lost
    assert tell is not None

    def late(*told: Any) -> None:
        assert goes_on.wait(30)
        tell(*told)

    in_flight._on_lost = late
    answer = CollectiveWork(None)
    with in_flight.lock:
        in_flight.begin(answer)
    of_gloo = threading.Thread(target=in_flight.failed, args=(answer, RuntimeError("Connection closed by peer")))
    of_gloo.start()
    with pytest.raises(PeerLost):
        answer.wait()
    enter(1)
    goes_on.set()
    of_gloo.join(30)
    assert recovery.round.announced is not None
    assert (recovery.round.announced.number, recovery.round.lost) == (1, None)
    recovery.part()


def eventually(found: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not found():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_members_train_on_until_who_comes_new_has_met_them(agent: Agent, rounds: Announcements) -> None:
    """A process that starts, or wakes, is told of a round long before it can be in it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = ("127.0.0.1", store.port)

    def announce_one(number: int, size: int, whole: bool) -> None:
        agent.say(kind="round", round=number, rank=0, world_size=size, store=place, whole=whole)

    recovery = Recovery(rounds)
    recovery.main.attach(forming.alone(), 0, 1)
    state: dict[str, Any] = {"w": torch.zeros(2)}
    recovery.track(state, Reducers(state))
    announce_one(0, 1, False)
    recovery.enter(0, Validity.NONE, lambda: None, lambda: None)
    announce_one(1, 2, True)
    link = PrefixStore("round-1", TCPStore(*place, is_master=False, wait_for_workers=False))
    link.get("link/0")  # it has begun to form
    assert not recovery.round.boundary_wanted
    assert recovery.round.lost is None
    other = forming.form(AnnouncedRound(1, 1, 2, place), lambda: False, 30.0)
    eventually(lambda: recovery.round.boundary_wanted)
    assert recovery.round.form_newest(3) == AnnouncedRound(1, 0, 2, place)
    assert recovery.round.announced is not None
    assert recovery.round.announced.number == 1
    recovery.part()
    forming.close(other, [], [])


def test_closing_a_round_that_was_overtaken_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has formed, and its connections take long to close."""
    ahead, done, closed, threads = BackgroundForming(), threading.Event(), threading.Event(), list[str]()

    def close(*_: object) -> None:
        threads.append(threading.current_thread().name)
        assert closed.wait(30)

    monkeypatch.setattr(forming, "close", close)
    ahead.start(1, lambda: cast(forming.FormedRound, None), done.set)
    assert done.wait(30)
    taken = threading.Thread(target=ahead.pop, args=(2,), name="pops", daemon=True)
    taken.start()
    taken.join(10)
    late = taken.is_alive()
    closed.set()
    taken.join(30)
    eventually(lambda: bool(threads))
    assert not late
    assert threads != ["takes"]


def test_round_that_formed_ahead_and_is_overtaken_is_closed(agent: Agent, rounds: Announcements) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ahead, done = BackgroundForming(), threading.Event()
    one = AnnouncedRound(1, 0, 1, ("127.0.0.1", store.port))
    ahead.start(1, lambda: forming.form(one, lambda: False, 30.0), done.set)
    assert done.wait(30)
    found = ahead._newest
    assert found is not None
    assert ahead.pop(2) is None
    eventually(lambda: found[1].result().main is None)


def test_a_profile_of_a_process_that_has_not_begun_to_train_is_refused_at_once(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        listener.settimeout(30)
        announcements = Announcements(str(tmp_path / "agent"))
        agent, _ = listener.accept()
        with agent, agent.makefile("rb") as said:
            agent.settimeout(30)
            agent.sendall(b'{"kind": "profile", "id": "first", "steps": 2}\n')
            answers = (json.loads(line) for line in said)
            answer = next(one for one in answers if one["kind"] == "profiled")
    assert answer["id"] == "first"
    assert answer["error"] == "this process has not begun to train yet; ask again when the job reports steps"
    del announcements


class Collecting:
    """A dataset in whose worker the garbage collector runs once the worker has a thread of its own. That thread has the
    stack, and so the handle, of a thread of the trainer's."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        if i > 1:
            gc.collect()
        return i


def test_worker_of_a_loader_frees_no_device_of_a_round_that_failed_to_form(in_child: Callable[..., int]) -> None:
    def train() -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        gc.disable()  # no collector has run in the trainer when its loader forks
        with pytest.raises(forming.FormingFailed):  # the other member is lost
            forming.form(AnnouncedRound(1, 0, 2, ("127.0.0.1", store.port)), lambda: False, 0.3)
        eventually(lambda: not any(t.name.startswith("everstep-form") for t in threading.enumerate()))
        loader: Any = DataLoader(cast(Any, Collecting()), batch_size=None, num_workers=1, timeout=20)
        assert list(loader) == [0, 1, 2, 3]

    assert in_child(train) == 0
