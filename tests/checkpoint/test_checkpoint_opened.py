"""A tensor or a slice of it is read without the rest; a plain web server will do, which cannot list and only gives."""

import dataclasses
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import Damaged, NoCommit, StateMismatch
from everstep.checkpoint.format.layout import record_name
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.storage import MemoryStore, StoreUnusable, open_store


class Counts(MemoryStore):
    read = 0

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        self.read += sum(len(b) for b in buffers)
        super().get_into(name, start, *buffers)


def saved(store: MemoryStore, state: dict[str, Any]) -> None:
    with everstep.Checkpointer(store=store, on_event=lambda kind, **_: None) as run:
        run.restore({})
        run.save(5, state)


INDICES: list[Any] = [
    ..., 3, -1, slice(10, 20), slice(None, None, 3), slice(5, 5), (slice(2, 9, 2), 1), (..., slice(1, 3)),
    (slice(None), slice(0, 2), -1), (0, 0, 0), (1, ...), slice(-3, None),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slice_is_what_torch_would_give(index: Any) -> None:
    store, whole = MemoryStore(), torch.arange(30 * 4 * 5, dtype=torch.int32).view(30, 4, 5)
    saved(store, {"model": {"a/b": whole}})
    tensor = everstep.open_commit(store=store).tensor("model/a~1b")
    assert (tensor.shape, tensor.dtype, len(tensor)) == ((30, 4, 5), torch.int32, 30)
    assert tensor[index].shape == whole[index].shape
    assert torch.equal(tensor[index], whole[index])


def test_slice_of_a_large_tensor_costs_a_chunk() -> None:
    store = Counts()
    big = torch.arange(10_000_000.0).view(-1, 10)
    saved(store, {"big": big, "model": {"w": torch.ones(3)}, "s": torch.tensor(2.0)})
    store.read = 0
    commit = everstep.open_commit(store=store)
    assert (commit.step, commit.n, commit.names()) == (5, 1, ("big", "model/w", "s"))
    assert store.read == 0
    assert torch.equal(commit.tensor("big")[500_000:500_010], big[500_000:500_010])
    assert store.read <= 2 * 2**20, "chunks of 1 MiB, and not 40 MB"
    assert commit.tensor("s")[...] == 2


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (30, IndexError, "model/w: index 30 on axis 0 of size 30"),
        ((0, 0), IndexError, "model/w: 2 indices for a tensor of 1 axes"),
        (slice(None, None, -1), TypeError, "only positive steps"),
        ([1, 2], TypeError, "an index of type list"),
        (True, TypeError, "an index of type bool"),
    ],
)
def test_index_that_cannot_be_taken_is_named(index: Any, error: type[Exception], text: str) -> None:
    store = MemoryStore()
    saved(store, {"model": {"w": torch.ones(30)}})
    with pytest.raises(error, match=text):
        everstep.open_commit(store=store).tensor("model/w")[index]


def test_what_is_not_there_is_named(runs: Any) -> None:
    store = MemoryStore()
    with pytest.raises(NoCommit, match="there is no commit"):
        everstep.open_commit(store=store)
    runs(store).save(1, 2)
    with pytest.raises(StateMismatch, match="no tensor 'v'; it has w"):
        everstep.open_commit(store=store).tensor("v")
    assert everstep.open_commit(store=store, step=1).tensor("w")[0] == 1
    shard = max(name for name in store.objects if name.startswith("data/"))
    store.objects[shard] = store.objects[shard][:-1] + b"\xff"
    with pytest.raises(Damaged, match=shard):
        everstep.open_commit(store=store).tensor("w")[:2]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[str, list[str]]]]:
    """A web server over `tmp_path` that lists nothing, with ranges or without; its URL and what it was asked for. It
    breaks the connection at the first eight requests for record `broken`."""
    servers = []

    def start(ranges: bool, broken: int = -1) -> tuple[str, list[str]]:
        asked: list[str] = []
        requests = itertools.count()

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(tmp_path))

            def list_directory(self, path: Any) -> None:
                self.send_error(404)

            def log_message(self, *_: Any) -> None:
                asked.append(f"{self.command} {self.path}")

            def parse_request(self) -> bool:
                parsed = super().parse_request()
                if parsed and self.path.endswith(record_name(broken)) and next(requests) < 8:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return False
                return parsed

            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                path = Path(self.translate_path(self.path))
                if not (ranges and wanted and path.is_file()):
                    return super().do_GET()
                data = path.read_bytes()
                first, last = wanted.removeprefix("bytes=").split("-")
                part = data[int(first) : int(last) + 1]
                self.send_response(206)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
                self.end_headers()
                self.wfile.write(part)
                return None

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/run", asked

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.mark.long_but("False")
@pytest.mark.parametrize("ranges", [True, False])
def test_web_server_gives_the_newest_commit(ranges: bool, serve: Any, tmp_path: Path, runs: Any) -> None:
    with everstep.Checkpointer(str(tmp_path / "run"), on_event=lambda kind, **_: None) as run:
        run.restore({})
        for step in range(1, 42):
            run.save(step, runs.state(step)).wait(30)
    url, asked = serve(ranges)
    into = runs.state()
    loaded = everstep.load(url, into)
    assert (loaded.step, loaded.n, set(into["w"].tolist())) == (41, 41, {41.0})
    assert len({line for line in asked if "HEAD" in line}) < 16, "not a request a record"
    assert everstep.load(url, step=40).step == 40
    assert everstep.load(url, n=41).state["step"] == 41
    assert everstep.open_commit(url).tensor("w")[5:8].tolist() == [41, 41, 41]
    with pytest.raises(StoreUnusable, match="can only be read"):
        everstep.Checkpointer(url).restore(runs.state())
    # A log that was copied in part: any record that exists is enough of a hint.
    for n in range(35):
        (tmp_path / "run" / record_name(n)).unlink()
    assert everstep.load(url, start=36).step == 41
    with pytest.raises(NoCommit, match=r"no record 0, .* cannot be listed.*start="):
        everstep.load(url)
    with pytest.raises(NoCommit, match=r"no record 99.*start="):
        everstep.open_commit(url, start=99)


@pytest.mark.long_but("19")
@pytest.mark.parametrize("broken", [19, 20])
def test_connection_that_breaks_leads_to_no_older_commit(broken: int, serve: Any, tmp_path: Path, runs: Any) -> None:
    runs(open_store(str(tmp_path / "run"))).save(*range(1, 21))
    url, _ = serve(True, broken)
    assert everstep.load(url, runs.state()).step == 20


@pytest.mark.parametrize("last", [0, 1, 2, 3, 4, 7, 8, 9, 100])
@pytest.mark.parametrize("first", [0, 1])
def test_end_of_a_log_that_cannot_be_listed(first: int, last: int) -> None:
    class Unlisted(MemoryStore):
        @property
        def capabilities(self) -> Any:
            return dataclasses.replace(super().capabilities, listable=False)

        def list(self, folder: str = "") -> Any:
            raise AssertionError("it cannot be listed")

    store = Unlisted()
    for n in range(first, max(first, last) + 1):
        store.create(record_name(n), b"?")
    assert CommitLog(store, start=first).head().last == max(first, last)


def test_server_that_answers_for_every_name_is_refused() -> None:
    class Soft(MemoryStore):
        @property
        def capabilities(self) -> Any:
            return dataclasses.replace(super().capabilities, listable=False)

        def size(self, name: str) -> int | None:
            return 5

        def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
            return b"login"

    for call in (everstep.load, everstep.open_commit):
        with pytest.raises(StoreUnusable, match="answers for names that do not exist"):
            call(store=Soft())
