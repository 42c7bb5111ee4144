"""A rank looks for rank 0's record, and concludes something; test_checkpoint_worlds.py does it with real ranks."""

from typing import Any

import pytest

from everstep.checkpoint.format.layout import record_name
from everstep.checkpoint.format.manifest import OpenRecord, encode_record
from everstep.checkpoint.log import opening
from everstep.checkpoint.ranks import Alone
from everstep.storage import MemoryStore, RetryableError, StorageError, StoreUnusable, TerminalError

OWN = OpenRecord(0, "0" * 32, 0, "", 2, "2026-01-01T00:00:00Z", (), -1, -1)


class Second(Alone):
    """Rank 1 of two; rank 0 sees its own record."""

    rank, world_size = 1, 2


class Broken(MemoryStore):
    def __init__(self, error: StorageError) -> None:
        super().__init__()
        self.error = error

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        raise self.error


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PATIENCE", 0.2)


def test_record_that_is_there_is_shared() -> None:
    store = MemoryStore()
    store.create(record_name(0), encode_record(OWN))
    opening.check_shared(store, OWN, Second())


@pytest.mark.parametrize("other", [None, b"another log"])
def test_record_that_is_not_there_is_not_shared(other: bytes | None) -> None:
    store = MemoryStore()
    if other is not None:
        store.create(record_name(0), other)
    with pytest.raises(StoreUnusable, match=r"rank 1 .* not shared between them. All ranks need one folder"):
        opening.check_shared(store, OWN, Second())


def test_store_that_is_away_says_nothing_and_one_that_refuses_does() -> None:
    opening.check_shared(Broken(RetryableError("away")), OWN, Second())
    with pytest.raises(StoreUnusable, match="not shared"):
        opening.check_shared(Broken(TerminalError("no")), OWN, Second())


def test_bucket_and_a_single_rank_are_not_looked_at() -> None:
    class Bucket(Broken):
        url: Any = "s3://bucket/run"

    opening.check_shared(Bucket(TerminalError("no")), OWN, Second())
    opening.check_shared(Broken(TerminalError("no")), OWN, Alone())
