"""Links between agents on a network that loses packets: namespaces of this kernel, real connections (failures 60, 61).

No process does anything but keep its links here; `tests/agent/test_agent_partition.py` has jobs that train.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from everstep.contract.document import Member
from everstep.membership.peers import peer_monitor
from everstep.membership.peers.peer_monitor import (
    DETECTED,
    PAUSE,
    SMALL,
    SOON,
    PeerMonitor,
    _around,
    _Follower,
    pause,
    probation,
)
from everstep.membership.peers.probe import ANSWER_BYTE, HELLO
from everstep.membership.peers.standstill import Standstill
from everstep.membership.world_state import Round
from support.network.netspaces import Machines
from support.network.slow_network import SlowNetwork
from support.rendezvous.agents import LIMIT, until

LEASE = 3.0


class Heard:
    """What links say, with the time."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, float]] = []
        self.answers = True  # whether others can be told
        self._times: Counter[str] = Counter()  # that the document has of each pair
        self._lock = threading.Lock()

    def lost(self, agent: str, why: str) -> bool:
        self._say("lost", agent)
        return self.answers

    def unreached(self, agent: str) -> int:
        self._say("unreached", agent)
        if self.answers:
            self._times[agent] += 1
        return self._times[agent] if self.answers else 0

    def reached(self, agent: str) -> bool:
        self._say("reached", agent)
        return self.answers

    def _say(self, what: str, agent: str) -> None:
        with self._lock:
            self.said.append((what, agent, time.monotonic()))

    def when(self, what: str, agent: str) -> float:
        return until(lambda: next((at for w, a, at in self.said if (w, a) == (what, agent)), 0.0))


class Crew:
    """One agent on each machine, all in one round."""

    def __init__(self, machines: Machines, names: str, addresses: dict[str, str] | None = None) -> None:
        self._machines, self._addresses = machines, addresses or machines.addresses
        self.monitors: dict[str, PeerMonitor] = {}
        self.heard = {name: Heard() for name in names}
        for name in names:
            with machines.inside(name):
                self.monitors[name] = PeerMonitor(name)
        self.form(names)

    def form(self, names: str) -> None:
        members = tuple(
            Member(number, name, address=self._addresses[name], link_port=self.monitors[name].port)
            for number, name in enumerate(names)
        )
        for rank, name in enumerate(names):
            with self._machines.inside(name):
                self.monitors[name].follow(Round(1, rank, members), self.heard[name], LEASE)

    def meet(self, limit: float = LIMIT) -> None:
        """Wait until all neighbours have met."""
        followers = [f for peers in self.monitors.values() for f in peers._followed.values() if f.stays]
        until(lambda: all(f._connected for f in followers), limit)

    def said(self) -> list[tuple[str, str, str]]:
        return sorted((name, what, who) for name, heard in self.heard.items() for what, who, _ in heard.said)

    def close(self) -> None:
        for one in self.monitors.values():
            one.close()


@contextmanager
def without_a_processor() -> Iterator[Callable[[], float]]:
    """Seconds by which a thread that asks for a processor twenty times a second got it too late, in all: what the links
    promise does not hold for these."""
    late, over = [0.0], threading.Event()

    def look() -> None:
        before = time.monotonic()
        while not over.wait(0.05):
            now = time.monotonic()
            late[0] += now - before - 0.05
            before = now

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: late[0]
    finally:
        over.set()
        thread.join()


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Machines(*"abcdefg") as made:
        yield made


@pytest.mark.parametrize("size", range(1, 40))
def test_each_pair_is_looked_at_by_one_of_both_and_up_to_sixteen_have_a_connection(size: int) -> None:
    members = tuple(Member(i, f"m{i}", link_port=1) for i in range(size))
    near, far = zip(*(_around(Round(1, rank, members)) for rank in range(size)), strict=True)
    looked = [{m.index for m in (*one.values(), *other)} for one, other in zip(near, far, strict=True)]
    for a in range(size):
        assert a not in looked[a]
        assert len(near[a]) == min(size - 1, 2 if size > SMALL else max(2, size // 2))
        assert all(b in looked[a] or a in looked[b] for b in range(size) if b != a)


@pytest.mark.long_but("ab-ba")
@pytest.mark.parametrize("lost", [["ab"], ["ab", "ba"]], ids="-".join)
def test_packets_that_are_lost_one_way_or_both_are_noticed_in_time_by_both_and_the_end_of_it_too(
    lost: list[str], machines: Machines
) -> None:
    crew = Crew(machines, "abc")
    try:
        crew.meet()
        for sender, receiver in lost:  # type: ignore[str-unpack]
            machines.drop(sender, receiver)
        at = time.monotonic()
        with without_a_processor() as late:
            took = [crew.heard[one].when("unreached", other) - at for one, other in ("ab", "ba")]
            print(f"noticed after {took[0]:.2f} and {took[1]:.2f} s, {late():.2f} of them without a processor")
            assert max(took) < DETECTED + late()
        assert crew.said() == [("a", "unreached", "b"), ("b", "unreached", "a")], "and nobody else is blamed"
        machines.heal()
        healed = time.monotonic()
        back = [crew.heard[one].when("reached", other) - healed for one, other in ("ab", "ba")]
        print(f"whole again after {back[0]:.2f} and {back[1]:.2f} s")
        assert min(back) >= probation(1)
    finally:
        crew.close()


@pytest.mark.long
def test_who_is_out_of_the_round_is_still_looked_for_by_who_missed_it(machines: Machines) -> None:
    crew = Crew(machines, "ab")
    try:
        crew.meet()
        machines.drop("a", "b")
        crew.heard["a"].when("unreached", "b")
        crew.form("a")  # goes on alone: b is no neighbour any more
        machines.heal()
        crew.heard["a"].when("reached", "b")
        until(lambda: all(f.over for f in crew.monitors["a"]._followed.values()))
    finally:
        crew.close()


@pytest.mark.long
def test_members_that_are_far_apart_are_looked_at_in_turn(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_monitor, "SMALL", 5)
    crew = Crew(machines, "abcdefg")
    try:
        crew.meet()
        machines.drop("a", "d")
        at = time.monotonic()
        print(f"noticed after {crew.heard['a'].when('unreached', 'd') - at:.2f} s")
        machines.heal()
        crew.heard["a"].when("reached", "d")
        until(lambda: all(f.stays for f in crew.monitors["a"]._followed.values() if not f.over))
    finally:
        crew.close()


@pytest.mark.long
def test_what_could_not_be_told_is_told_again_without_another_attempt(machines: Machines) -> None:
    """A store has no leader for a moment when the machine that is lost held it: the round waits for no attempt."""
    crew = Crew(machines, "ab")
    try:
        crew.meet()
        crew.heard["a"].answers = False
        machines.drop("a", "b")
        with without_a_processor() as late:
            until(lambda: crew.said().count(("a", "unreached", "b")) >= 2)
            first, second = [at for what, _, at in crew.heard["a"].said if what == "unreached"][:2]
            assert second - first < peer_monitor.LOOK_AGAIN + late()
        crew.heard["a"].answers = True
        machines.heal()
        crew.heard["a"].when("reached", "b")
    finally:
        crew.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("delay", "loss", "seconds"),
    [(0.0, 0.3, 5.0), pytest.param(0.5, 0.3, 60.0, marks=pytest.mark.timeout(300))],
    ids=["lost", "lost and late"],
)
def test_a_bad_network_separates_nobody(
    delay: float, loss: float, seconds: float, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that are far apart are looked at all the time."""
    monkeypatch.setattr(peer_monitor, "LATER_LAPS", 0.05)
    monkeypatch.setattr(peer_monitor, "SMALL", 5)
    with SlowNetwork(machines, "abcdefg", bad="abcdefg", delay=delay, loss=loss) as slow:
        crew = Crew(machines, "abcdefg", slow.addresses)
        try:
            crew.meet(seconds + LIMIT)
            time.sleep(seconds)
            assert crew.said() == []
        finally:
            crew.close()


class Pauses(threading.Event):
    """What a follower waits for between its attempts, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout or 0.0)
        return super().wait(timeout)


def peer(listener: socket.socket) -> Member:
    return Member(1, "b", address="127.0.0.1", link_port=listener.getsockname()[1])


def test_connection_that_a_dying_listener_still_took_is_looked_at_again_at_once() -> None:
    """The kernel of a process that dies closes its connections, and its listener a moment later."""
    heard, pauses = Heard(), Pauses()
    listener = socket.create_server(("127.0.0.1", 0))
    follower = _Follower(peer(listener), heard, LEASE, stopped=pauses)
    held, _ = listener.accept()
    held.sendall(f"{HELLO}b\n".encode())
    until(lambda: follower._connected)
    held.close()
    assert select.select([listener], [], [], LIMIT)[0], "it connects again, and nobody accepts that"
    listener.close()
    heard.when("lost", "b")
    assert sum(pauses.asked) < 0.05, pauses.asked


def test_peer_that_ends_each_connection_is_asked_ever_less_often() -> None:
    heard, pauses = Heard(), Pauses()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        follower = _Follower(peer(listener), heard, LEASE, stopped=pauses)
        for _ in range(10):
            listener.accept()[0].close()
        follower.stop()
    assert pauses.asked[:10] == [pause(times) for times in range(1, len(pauses.asked[:10]) + 1)]
    assert (pause(1), pause(7), pause(10_000)) == (SOON, PAUSE, PAUSE)
    assert heard.said == []


# --- a process that stands still


class FakePeer:
    """Greets, and answers beats. While it is frozen only its kernel accepts and acknowledges."""

    def __init__(self, *, answers: bool = True) -> None:
        self._answers, self._frozen, self._over = answers, threading.Event(), threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.beats = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        guests: list[socket.socket] = []
        while not self._over.wait(0.01):
            if self._frozen.is_set():
                continue
            for one in select.select([self.listener, *guests], [], [], 0.05)[0]:
                try:
                    if one is self.listener:
                        guests.append(self.listener.accept()[0])
                        guests[-1].sendall(f"{HELLO}b\n".encode())
                    elif not one.recv(256):
                        raise ConnectionResetError
                    elif self._answers:
                        self.beats += 1
                        one.send(ANSWER_BYTE)
                except OSError:  # a guest that gave up
                    (guests.pop() if one is self.listener else guests.pop(guests.index(one))).close()
        for one in (self.listener, *guests):
            one.close()

    def freeze(self) -> float:
        self._frozen.set()
        return time.monotonic()

    def thaw(self) -> None:
        self._frozen.clear()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def followed(peer_process: FakePeer) -> Iterator[Heard]:
    heard = Heard()
    follower = _Follower(peer(peer_process.listener), heard, LEASE)
    until(lambda: follower._connected)
    try:
        yield heard
    finally:
        follower.stop()
        peer_process.end()


def test_process_that_answers_nothing_for_a_lease_though_its_kernel_does_is_lost() -> None:
    frozen = FakePeer()
    with followed(frozen) as heard, without_a_processor() as late:
        until(lambda: frozen.beats >= 3)
        at = frozen.freeze()
        took = heard.when("lost", "b") - at
        print(f"lost after {took:.2f} s")
        assert LEASE - 0.5 < took < LEASE + 1.0 + late()
    assert [what for what, _, _ in heard.said] == ["lost"]


@pytest.mark.long
def test_process_that_stands_still_for_less_than_a_lease_again_and_again_is_not_lost() -> None:
    slow = FakePeer()
    with followed(slow) as heard:
        for _ in range(4):
            beats = slow.beats
            until(lambda seen=beats: slow.beats > seen)
            slow.freeze()
            time.sleep(LEASE - 1.0)
            slow.thaw()
    assert heard.said == []


@pytest.mark.long
def test_peer_of_a_release_that_answers_no_beat_is_not_judged_by_its_silence() -> None:
    with followed(FakePeer(answers=False)) as heard:
        time.sleep(LEASE + 2.0)
    assert heard.said == []


def test_late_answers_of_a_process_that_greets_show_that_it_runs() -> None:
    """A network that holds one connection back: TCP waits ever longer before it sends again what was lost."""
    runs = FakePeer()
    member = peer(runs.listener)
    try:
        judged = Standstill(member, LEASE, 0.0)
        judged.clear()
        now = 0.0
        for _ in range(200):
            now += 0.1
            assert not judged.look(now, 0.0)
            time.sleep(0.005)
        judged.close()
    finally:
        runs.end()


def test_time_in_which_the_follower_did_not_run_counts_for_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        judged = Standstill(peer(frozen), LEASE, 0.0)
        judged.clear()
        assert not judged.look(100.0, 0.0)
        now = 100.0
        while not judged.look(now, 0.0):
            now += 0.25
        assert now - 100.0 > LEASE - 1.0
        judged.close()
