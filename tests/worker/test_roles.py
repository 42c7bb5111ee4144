"""everstep.roles: each follower is lost alone, followers find the next hub, and strangers get no answer."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from everstep.contract import env
from everstep.roles import Ask, Hub, HubLost, RolesError, follow, wire

SECONDS = 30


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.AGENT_SOCKET, "RANK", env.JOB_UID, "PET_LOCAL_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(env.CHECKPOINT_URL, str(tmp_path))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def followed(pool: ThreadPoolExecutor, work: Callable[[Ask], None], **options: Any) -> Future[None]:
    return pool.submit(follow, work, **options)


def test_a_follower_is_answered_until_the_run_is_over(pool: ThreadPoolExecutor) -> None:
    replies: list[Any] = []
    came = threading.Semaphore(0)

    def work(ask: Ask) -> None:
        while True:
            replies.append(ask({"n": len(replies), "values": [torch.arange(3), None, "text", 1.5]}))
            came.release()

    with Hub(lambda peer, message: (peer, message["n"], message["values"][0] * 2)):
        ends = followed(pool, work)
        assert all(came.acquire(timeout=SECONDS) for _ in range(3))
    ends.result(SECONDS)
    assert [(peer, n) for peer, n, _ in replies[:3]] == [(0, 0), (0, 1), (0, 2)]
    assert torch.equal(replies[0][2], torch.tensor([0, 2, 4]))
    followed(pool, work).result(SECONDS)  # one that comes later is not kept waiting


def test_a_lost_follower_is_told_to_the_hub_and_stops_nobody(pool: ThreadPoolExecutor) -> None:
    left: list[int] = []
    gone, go_on = threading.Event(), threading.Event()

    def forget(peer: int) -> None:
        left.append(peer)
        gone.set()

    def dies(ask: Ask) -> None:
        ask("here")
        raise KeyboardInterrupt

    def lives(ask: Ask) -> None:
        ask("here")
        go_on.wait(SECONDS)
        assert ask("still here") == "yes"

    with Hub(lambda peer, message: "yes", forget):
        other = followed(pool, lives)
        with pytest.raises(KeyboardInterrupt):
            follow(dies)
        assert gone.wait(SECONDS)
        assert len(left) == 1
        go_on.set()
        other.result(SECONDS)


def test_followers_find_the_hub_that_takes_a_lost_ones_place(pool: ThreadPoolExecutor) -> None:
    met = [threading.Event(), threading.Event()]
    lost: list[str] = []

    def work(ask: Ask) -> None:
        try:
            while True:
                met[ask(None)].set()
        except HubLost as e:
            lost.append(str(e))
            raise

    class Killed(Exception):
        pass

    ends = followed(pool, work)
    with contextlib.suppress(Killed), Hub(lambda peer, message: 0):
        assert met[0].wait(SECONDS)
        raise Killed
    assert not ends.done()
    with Hub(lambda peer, message: 1):
        assert met[1].wait(SECONDS)
    ends.result(SECONDS)
    assert len(lost) == 2


def test_an_error_in_an_answer_ends_the_peer_with_its_text() -> None:
    def fails(peer: int, message: Any) -> Any:
        raise KeyError(message)

    with Hub(fails), pytest.raises(RolesError, match="the hub's answer failed: KeyError: 'fragment'"):
        follow(lambda ask: ask("fragment"))


@pytest.mark.parametrize(("grace", "hub_leaves"), [("60", True), ("1", False)])
def test_a_follower_that_is_told_to_stop_stays_while_its_hub_may_need_it(
    monkeypatch: pytest.MonkeyPatch, grace: str, hub_leaves: bool
) -> None:
    """A job is suspended: all processes get SIGTERM, and the hub's step needs what the follower still computes."""
    monkeypatch.setenv(env.GRACE_SECONDS, grace)
    came = threading.Semaphore(0)

    def work(ask: Ask) -> None:
        while True:
            ask(None)

    class Preempted(Exception):
        pass

    if (follower := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            follow(work)
        os._exit(1)
    with contextlib.suppress(Preempted), Hub(lambda peer, message: came.release()):
        assert came.acquire(timeout=SECONDS)
        os.kill(follower, signal.SIGTERM)
        for _ in range(100):
            assert came.acquire(timeout=SECONDS)
        if hub_leaves:
            raise Preempted
        _, status = os.waitpid(follower, 0)
    if hub_leaves:
        _, status = os.waitpid(follower, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_reply_that_cannot_be_sent_ends_the_peer_with_its_text() -> None:
    with Hub(lambda peer, message: lambda: 1), pytest.raises(RolesError, match=r"the hub's answer failed: .*pickle"):
        follow(lambda ask: ask(1))


def test_threads_of_a_follower_get_their_own_replies() -> None:
    wrong: list[Any] = []

    def work(ask: Ask) -> None:
        def many(name: str) -> None:
            wrong.extend(got for i in range(50) if (got := ask((name, i))) != (name, i))

        with ThreadPoolExecutor() as threads:
            list(threads.map(many, "abc"))

    with Hub(lambda peer, message: message):
        follow(work)
    assert wrong == []


def test_a_question_that_was_interrupted_leaves_its_reply_to_nobody() -> None:
    """A time limit by a signal, as scripts set it, leaves `ask` while the hub still computes."""
    go_on, got = threading.Event(), list[Any]()

    class TimeUp(Exception):
        pass

    def time_up(*_: Any) -> None:
        raise TimeUp

    def answer(peer: int, message: str) -> str:
        if message == "slow":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            go_on.wait(SECONDS)
        return message

    def work(ask: Ask) -> None:
        if not got:
            with pytest.raises(TimeUp):
                ask("slow")
            go_on.set()
            got.append("interrupted")
        got.append(ask("quick"))

    before = signal.signal(signal.SIGALRM, time_up)
    try:
        with Hub(answer):
            follow(work)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert got == ["interrupted", "quick"]


def test_a_follower_of_two_hubs_finds_the_one_that_was_lost(pool: ThreadPoolExecutor) -> None:
    met = [threading.Event(), threading.Event()]

    class Killed(Exception):
        pass

    def of_both(ask: Ask) -> None:
        def of_second(also: Ask) -> None:
            while True:
                met[ask(None)].set()
                also(None)

        follow(of_second, name="second")

    with Hub(lambda peer, message: None, name="second"):
        with contextlib.suppress(Killed), Hub(lambda peer, message: 0, name="first"):
            ends = followed(pool, of_both, name="first")
            assert met[0].wait(SECONDS)
            raise Killed
        with Hub(lambda peer, message: 1, name="first"):
            assert met[1].wait(SECONDS)
    ends.result(SECONDS)


def test_another_program_at_a_lost_hubs_port_is_no_hub(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "GREETING_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:  # takes connections, and never says a word
        (tmp_path / "roles").mkdir()
        said = {"host": "127.0.0.1", "port": other.getsockname()[1], "token": "of the lost one"}
        (tmp_path / "roles/hub-alone.json").write_text(json.dumps(said))
        ends = followed(pool, lambda ask: ask(None))
        other.accept()
        with Hub(lambda peer, message: None):
            ends.result(SECONDS)


def test_a_hub_that_had_no_free_files_takes_peers_again(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Hub(lambda peer, message: "yes"):
        said = address(tmp_path)
        callers = [socket.socket() for _ in range(4)]
        try:
            with open(os.devnull) as newest:
                resource.setrlimit(resource.RLIMIT_NOFILE, (newest.fileno(), hard))
            for caller in callers:
                caller.connect((said["host"], said["port"]))
            time.sleep(0.2)  # the hub finds no file for the second one
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for caller in callers:
                caller.close()
        replies: list[Any] = []
        follow(lambda ask: replies.append(ask(None)))
    assert replies == ["yes"]


def test_a_hub_listens_on_an_ipv6_address(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_LOCAL_ADDR", "::1")
    with Hub(lambda peer, message: None):
        followed(pool, lambda ask: ask(None)).result(SECONDS)


def test_a_hub_that_exits_with_success_ends_the_run() -> None:
    with pytest.raises(SystemExit), Hub(lambda peer, message: None):
        sys.exit(0)
    follow(lambda ask: ask(None))  # returns


def test_an_error_in_left_is_logged_by_name(pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture) -> None:
    came = threading.Event()

    def left(peer: int) -> None:
        came.set()
        raise KeyError(peer)

    with caplog.at_level("ERROR", "everstep.roles"), Hub(lambda peer, message: None, left):
        follow(lambda ask: ask(None))
        assert came.wait(SECONDS)
        while not caplog.records:
            time.sleep(0.01)
    assert "left(0) failed" in caplog.text


def address(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "roles/hub-alone.json").read_text())
    return found


def test_a_stranger_without_the_token_gets_no_answer(tmp_path: Path) -> None:
    asked: list[Any] = []
    with Hub(lambda peer, message: asked.append(message)):
        said = address(tmp_path)
        with socket.create_connection((said["host"], said["port"]), SECONDS) as stranger:
            stranger.sendall(b"x" * len(said["token"]))
            assert stranger.recv(1) == b"", "the hub hangs up"
    assert asked == []


class Runs:
    ran: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return Runs.ran.append, (1,)


def test_a_message_that_would_run_code_is_refused(tmp_path: Path) -> None:
    with Hub(lambda peer, message: None):
        said = address(tmp_path)
        with socket.create_connection((said["host"], said["port"]), SECONDS) as peer:
            data = pickle.dumps(Runs(), protocol=2)
            wire.greet(peer, said["token"])
            peer.sendall(struct.pack("!Q", len(data)) + data)
            assert "send dictionaries, lists, tensors, numbers and texts" in wire.unpacked(wire.received(peer))["error"]
    assert Runs.ran == []


def test_jobs_that_share_a_url_do_not_meet(monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
    monkeypatch.setenv(env.JOB_UID, "first")
    with Hub(lambda peer, message: "first"):
        pass  # over
    monkeypatch.setenv(env.JOB_UID, "second")
    replies: list[Any] = []
    ends = followed(pool, lambda ask: replies.append(ask(None)))
    with Hub(lambda peer, message: "second"):
        ends.result(SECONDS)
    assert replies == ["second"]


@pytest.mark.parametrize("variable", [env.AGENT_SOCKET, "RANK"])
def test_processes_of_a_world_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0")
    with pytest.raises(
        RolesError, match=r"start a script with roles by `python`, as in `command: \[python, train.py\]`"
    ):
        follow(lambda ask: None)
    with pytest.raises(RolesError, match="are one world"):
        Hub(lambda peer, message: None)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(RolesError, match=r"name='The hub': a hub's name has lower-case letters"):
        follow(lambda ask: None, name="The hub")
    (tmp_path / "roles").mkdir()
    (tmp_path / "roles/hub-alone.json").write_text("[]")
    with pytest.raises(RolesError, match=r"roles/hub-alone.json cannot be read as a hub's address .*: delete it"):
        follow(lambda ask: None)
