"""everstep.roles: each follower is lost alone, followers find the next hub, and strangers get no answer."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
import threading
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
            peer.sendall(said["token"].encode() + struct.pack("!Q", len(data)) + data)
            assert "send dictionaries, lists, tensors, numbers and texts" in wire.receive(peer)["error"]
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
