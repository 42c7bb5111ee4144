"""A folder on an SSH server, over real connections: saved to, read by many threads, and after a lost connection."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
import torch
from fsspec.implementations.sftp import SFTPFileSystem

import everstep
from everstep.storage import AlreadyExists, NotFound, RetryableError, RetryingStore, StoreUnusable, open_store
from everstep.storage.rate_limit import Pacer
from support.network.sftp_server import PASSWORD, Files, SftpServer, sftp_server


@pytest.fixture(scope="module")
def server() -> Iterator[SftpServer]:
    with sftp_server() as server:
        yield server


def opened(server: SftpServer, folder: Path, password: str = PASSWORD) -> Any:
    options = {"password": password, "look_for_keys": False, "allow_agent": False}
    return open_store(f"sftp://me@127.0.0.1:{server.port}{folder}/run", options, single_committer=True)


def test_run_saves_to_an_ssh_server_and_loads_from_it(server: SftpServer, tmp_path: Path) -> None:
    with everstep.Checkpointer(store=opened(server, tmp_path), keep=1) as run:
        run.restore({"w": torch.zeros(4), "step": 0})
        for step in (1, 2):
            run.save(step, {"w": torch.full((4,), float(step)), "step": step}).wait(60)
    loaded = everstep.load(store=opened(server, tmp_path))
    assert (loaded.step, loaded.state["w"].tolist()) == (2, [2.0] * 4)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == [path.name for path in tmp_path.rglob("data/*/*")]
    assert list(tmp_path.rglob(".tmp-*")) == []


def test_threads_of_one_store_get_their_own_answers(server: SftpServer, tmp_path: Path) -> None:
    store = opened(server, tmp_path)

    def work(number: int) -> bytes:
        name, data = f"a/{number}", bytes([number]) * 1000
        store.put(name, data)
        assert store.size(name) == 1000
        assert store.get(name) == data
        return bytes(store.get(name, 3, 5))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(24))) == [bytes([n]) * 2 for n in range(24)]


def test_what_is_not_there_and_folders_are_no_objects(server: SftpServer, tmp_path: Path) -> None:
    store = opened(server, tmp_path)
    store.put("data/1/0", b"shard")
    for name in ("data/1", "data/2", "none"):
        assert store.size(name) is None
        with pytest.raises(NotFound):
            store.get(name)
    assert [(info.name, info.size) for info in store.list()] == [("data/1/0", 5)]


def test_lost_connection_is_made_again(server: SftpServer, tmp_path: Path) -> None:
    once = opened(server, tmp_path)
    once.put("a", b"first")
    server.drop()
    with pytest.raises(RetryableError, match="the connection to the SSH server"):
        once.get("a")
    assert once.get("a") == b"first"
    store = RetryingStore(opened(server, tmp_path), pacer=Pacer(), sleep=lambda _: None)
    logins = server.logins
    for number in range(3):
        store.put("a", bytes([number]))
        server.drop()
        assert store.get("a") == bytes([number])
    assert server.logins == logins + 4


def test_ranks_that_make_the_folder_of_a_save_at_once_all_write_into_it(
    server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank makes each folder after this one has looked; the server then says only that it failed."""
    make = Files.mkdir

    def second(self: Any, path: str, attr: Any) -> Any:
        assert make(self, path, attr) == paramiko.SFTP_OK
        return make(self, path, attr)

    monkeypatch.setattr(Files, "mkdir", second)
    store = opened(server, tmp_path)
    store.put("data/1/0", b"shard")
    assert store.get("data/1/0") == b"shard"


def test_connection_lost_while_a_folder_is_made_is_no_missing_bucket(
    server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = SFTPFileSystem.info

    def lost(self: Any, path: str) -> Any:
        if path == f"/{tmp_path.parts[1]}":
            self.client.get_transport().close()
        return look(self, path)

    with monkeypatch.context() as broken:
        broken.setattr(SFTPFileSystem, "info", lost)
        store = opened(server, tmp_path)
        with pytest.raises(RetryableError):
            store.put("data/1/0", b"shard")
    store.put("data/1/0", b"shard")
    assert store.get("data/1/0") == b"shard"


@pytest.mark.long
def test_small_object_does_not_wait_for_a_large_one(
    server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign of life that waited for a shard would come too late, and the run that lives would be fenced."""
    store, begun, go_on = opened(server, tmp_path), threading.Event(), threading.Event()
    store.put("data/0", b"")
    open_file = Files.open

    def slow(self: Any, path: str, flags: int, attr: Any) -> Any:
        if path.startswith(str(tmp_path / "run/data")):
            begun.set()
            go_on.wait(60)
        return open_file(self, path, flags, attr)

    monkeypatch.setattr(Files, "open", slow)
    with ThreadPoolExecutor(4) as pool:
        try:
            shard = pool.submit(store.put, "data/1", bytes(2**20 + 1))
            assert begun.wait(30)
            pool.submit(store.put, "alive/0", b"1").result(30)
            assert pool.submit(store.get, "alive/0").result(30) == b"1"
            begun.clear()
            part = pool.submit(store.get, "data/0", 0, 1)
            assert not shard.done()
            pool.submit(store.put, "alive/0", b"2").result(30)
        finally:
            go_on.set()
        shard.result(60)
        assert part.result(60) == b""
    assert store.size("data/1") == 2**20 + 1


def test_folder_goes_with_its_last_object(server: SftpServer, tmp_path: Path) -> None:
    store = opened(server, tmp_path)
    for name in ("data/1/0", "data/1/1", "data/2/0"):
        store.put(name, b"shard")
    store.delete("data/1/0")
    assert [info.name for info in store.list()] == ["data/1/1", "data/2/0"]
    store.delete("data/1/1")
    store.delete("data/1/1")
    assert sorted(path.name for path in (tmp_path / "run/data").iterdir()) == ["2"]
    store.put("data/1/0", b"again")
    assert store.get("data/1/0") == b"again"


def test_folder_that_another_removes_meanwhile_is_made_again(
    server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, left = SFTPFileSystem.makedirs, [1]

    def taken(self: Any, path: str, **options: Any) -> None:
        make(self, path, **options)
        if left:
            left.pop()
            Path(path).rmdir()

    monkeypatch.setattr(SFTPFileSystem, "makedirs", taken)
    store = opened(server, tmp_path)
    store.put("a/0", b"1")
    assert store.get("a/0") == b"1"


def test_creator_that_looked_before_another_created_is_refused(
    server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(server, tmp_path), opened(server, tmp_path)
    store.put("log/0", b"")
    look = SFTPFileSystem.info

    def late(self: Any, path: str) -> Any:
        try:
            return look(self, path)
        finally:
            if path.endswith("log/1") and self is store._made[1] and not (tmp_path / "run/log/1").exists():
                other.create("log/1", b"of the other")

    monkeypatch.setattr(SFTPFileSystem, "info", late)
    with pytest.raises(AlreadyExists):
        store.create("log/1", b"of this one")
    assert other.get("log/1") == b"of the other"
    assert [path.name for path in sorted((tmp_path / "run/log").iterdir())] == ["0", "1"]


def test_server_without_the_replacing_rename_takes_new_objects_and_old_names(
    server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Files, "posix_rename")
    store = opened(server, tmp_path)
    store.put("a", b"first")
    store.put("a", b"second")
    assert store.get("a") == b"second"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]


def test_name_service_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(RetryableError, match="name resolution"):
        open_store("sftp://me@storage.example/run", {"password": PASSWORD}, single_committer=True).get("a")


def test_wrong_password_is_named_and_not_tried_again(server: SftpServer, tmp_path: Path) -> None:
    logins = server.logins
    with pytest.raises(StoreUnusable, match=r"refuses this user.*storage_options"):
        RetryingStore(opened(server, tmp_path, "wrong"), pacer=Pacer()).get("a")
    assert server.logins == logins + 1
