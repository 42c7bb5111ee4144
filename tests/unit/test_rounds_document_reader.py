"""Reading large documents beside other work, in one event loop."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import pytest

from everstep.contract.document import Document, DocumentInvalid, Member, Seat, Sizes, encode
from everstep.contract.fields import PIECE
from everstep_operator.rounds.document_reader import DocumentReader
from everstep_operator.rounds.documents import JobRef, RoundsUnavailable
from support.operator.round_stage import Stage, Term

MANY = 4096
LARGE = Document(
    Sizes(1, MANY),
    round=3,
    members=tuple(Member(i, f"agent-{i:05}", address="10.244.100.200", store_port=1) for i in range(MANY)),
    seats=tuple(Seat(i, f"agent-{i:05}", 0) for i in range(MANY)),
)
SMALL = Document(Sizes(1, 2), members=(Member(0, "a"),))


def job(name: str, namespace: str = "team") -> JobRef:
    return JobRef(namespace, name, f"uid-{name}")


class Rows:
    """How many rows are read in the longest turn of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        module = sys.modules["everstep.contract.document"]
        plain = module.read_member

        def read_member(row: object, name: str) -> Member:
            self.now += 1
            self.most = max(self.most, self.now)
            return plain(row, name)  # type: ignore[no-any-return]

        monkeypatch.setattr(module, "read_member", read_member)

    async def watch(self) -> None:
        while True:
            self.now = 0
            await asyncio.sleep(0)


async def test_large_documents_leave_the_loop_to_others_after_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, reader, data = Rows(monkeypatch), DocumentReader(), encode(LARGE)
    watch = asyncio.create_task(rows.watch())
    found = await asyncio.gather(*(reader.read(data, job(f"j{i}")) for i in range(4)))
    watch.cancel()
    assert all(one == (data.decode(), LARGE) for one in found)
    assert rows.most <= 2 * PIECE  # a task may turn twice between two looks of another


async def test_swap_and_load_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way that a document comes into the operator."""
    stage = Stage()
    await stage.start()
    rows, rounds = Rows(monkeypatch), stage.operator()
    watch = asyncio.create_task(rows.watch())
    version = await rounds.of(stage.job).swap(0, encode(replace(LARGE, round=0, members=(), joining=LARGE.members)))
    assert version is not None
    again = stage.operator()
    assert (await again.of(stage.job).read(0)).version == version
    watch.cancel()
    assert MANY > 2 * PIECE >= rows.most > 0


async def test_swap_whose_document_is_read_while_the_leadership_changes_is_refused() -> None:
    """The object that began to read belongs to a leadership that is over, also if the same replica leads again."""
    stage, term = Stage(), Term()
    await stage.start()
    rounds = stage.operator(term=term)
    body = encode(replace(LARGE, round=0, members=(), joining=LARGE.members))
    swap = asyncio.create_task(rounds.of(stage.job).swap(0, body))
    await asyncio.sleep(0)
    term.epoch += 1
    rounds.forget_all()
    with pytest.raises(RoundsUnavailable, match="leadership has changed"):
        await swap
    assert await stage.stored() is None
    assert await rounds.of(stage.job).swap(0, body) is not None


async def test_small_document_and_that_of_another_namespace_do_not_wait_for_many_large_ones() -> None:
    reader, data = DocumentReader(), encode(LARGE)
    order: list[str] = []

    async def read(namespace: str, name: str, data: bytes) -> None:
        await reader.read(data, job(name, namespace))
        order.append(name)

    tasks = [asyncio.create_task(read("hostile", f"h{i}", data)) for i in range(8)]
    tasks += [
        asyncio.create_task(read("team", "large", data)),
        asyncio.create_task(read("team", "small", encode(SMALL))),
    ]
    await asyncio.gather(*tasks)
    assert order[:2] == ["small", "large"]


@pytest.mark.parametrize(
    "data", [b"\xff" * 20_000, b"[" * 20_000, encode(LARGE).replace(b"agent-04000", b"agent-00000"), b"{}"]
)
async def test_what_is_no_document_is_refused_and_stops_no_other(data: bytes) -> None:
    reader = DocumentReader()
    with pytest.raises(DocumentInvalid):
        await reader.read(data, job("bad"))
    assert await reader.read(encode(LARGE), job("good")) == (encode(LARGE).decode(), LARGE)
