"""The saved position: JSON there and back, and what is refused on the way (failure 87)."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.errors import DataError, DatasetChanged, DatasetUnusable, PositionMismatch
from everstep.data.fingerprints import Fingerprint, difference, fingerprint
from everstep.data.plan.cursor import Cursor, check_changes, parse, resume
from everstep.data.sketches import digest_of

DATA = Fingerprint(1000, "Images", "mnist-1")
OWN = Cursor(seed=5, epoch=0, index=0, global_batch=10, order="permutation-1", dataset=DATA)
SAVED = replace(OWN, epoch=3, index=120)


@settings(deadline=None)
@given(
    st.builds(
        Cursor,
        seed=st.integers(0, 2**64 - 1),
        epoch=st.integers(0, 2**63 - 1),
        index=st.integers(0, 1000),
        global_batch=st.integers(0, 2**48),
        order=st.text(),
        dataset=st.builds(Fingerprint, st.integers(1000, 2**48), st.text(), st.text()),
    )
)
def test_any_position_survives_json(cursor: Cursor) -> None:
    assert parse(json.loads(json.dumps(cursor.state_dict()))) == cursor


def test_state_is_in_the_documented_form() -> None:
    assert SAVED.state_dict() == {
        "version": 1,
        "seed": 5,
        "epoch": 3,
        "index": 120,
        "global_batch": 10,
        "order": "permutation-1",
        "dataset": {"length": 1000, "kind": "Images", "identity": "mnist-1"},
    }


def test_field_of_a_later_minor_version_is_ignored() -> None:
    assert parse({**SAVED.state_dict(), "new": 1}) == SAVED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2, this everstep reads version 1: use a newer everstep"),
        ({"version": "1"}, "version='1'"),
        ({"seed": -1}, "seed=-1: a number from 0"),
        ({"index": 1001}, "index=1001: a number from 0 to 1000"),
        ({"index": True}, "index=True"),
        ({"epoch": 1.5}, "epoch=1.5"),
        ({"order": None}, "order=None: a text"),
        ({"dataset": 3}, "dataset=3: a mapping"),
        ({"dataset": {"length": 0}}, "length=0"),
        ({"dataset": {"length": 1000}}, "kind=None"),
    ],
)
def test_damaged_position_is_refused_naming_the_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PositionMismatch, match=words):
        parse({**SAVED.state_dict(), **change})


def test_fitting_position_goes_on_with_the_saved_seed() -> None:
    assert resume(SAVED, replace(OWN, seed=77)) == SAVED


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Fingerprint(999, "Images", "mnist-1"), "its length was 1000 and is 999"),
        (Fingerprint(1000, "Images", "mnist-2"), "it was 'mnist-1' and is 'mnist-2'"),
        (Fingerprint(1000, "Pictures"), "it was a Images and is a Pictures"),
    ],
)
@pytest.mark.parametrize("index", [0, 120])
def test_87_changed_dataset_is_refused_naming_both_and_the_fix(now: Fingerprint, words: str, index: int) -> None:
    with pytest.raises(DatasetChanged, match=words) as caught:
        resume(replace(SAVED, index=index), replace(OWN, dataset=now))
    assert "saved: Images of 1000 samples, identity 'mnist-1'" in str(caught.value)
    assert f"now: {now}" in str(caught.value)
    assert "allow_changes={'dataset'}" in str(caught.value)


def test_87_changed_dataset_if_allowed_goes_on_with_the_next_epoch() -> None:
    own = replace(OWN, dataset=Fingerprint(2000, "Images", "mnist-2"))
    assert resume(SAVED, own, {"dataset"}) == replace(own, epoch=4, index=0)
    assert resume(replace(SAVED, index=0), own, {"dataset"}) == replace(own, epoch=3, index=0)


def test_moved_code_with_the_same_identity_is_the_same_dataset() -> None:
    assert difference(Fingerprint(9, "A", "x"), Fingerprint(9, "B", "x")) is None


def test_88_changed_global_batch_is_refused_unless_allowed() -> None:
    own = replace(OWN, global_batch=20)
    with pytest.raises(PositionMismatch, match=r"global_batch=10, this run has 20.*Pass global_batch=10, or allow"):
        resume(SAVED, own)
    assert resume(SAVED, own, {"global_batch"}) == replace(own, epoch=3, index=120)


def test_changed_order_is_refused_within_an_epoch_only() -> None:
    own = replace(OWN, order="in-order")
    with pytest.raises(PositionMismatch, match=r"sample 120 .*'permutation-1'.*'in-order'.*allow_changes={'order'}"):
        resume(SAVED, own)
    assert resume(replace(SAVED, index=0), own) == replace(own, epoch=3)
    assert resume(SAVED, own, {"order"}) == replace(own, epoch=4)


def test_unknown_change_cannot_be_allowed() -> None:
    assert check_changes("dataset") == {"dataset"}
    with pytest.raises(DataError, match=r"\['sede'\].*'dataset', 'global_batch', 'order'"):
        check_changes(["sede", "order"])


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Named(Rows):
    def fingerprint(self) -> str:
        return f"rows-{len(self.rows)}"


def test_digest_of_a_sample_is_of_its_content() -> None:
    rows = [{"x": torch.arange(4) + i, "t": (b"b", "s", i, None, 0.5)} for i in range(50)]
    assert len({digest_of(row) for row in rows}) == 50
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest_of([tensor]) == digest_of([tensor.numpy()])
    assert digest_of([tensor.bfloat16()]) == digest_of([tensor])


@pytest.mark.parametrize("odd", [object(), {1}, np.array([object()])])
def test_what_has_no_digest_hides_nothing_beside_it(odd: Any) -> None:
    assert digest_of((odd, 1)) == digest_of((odd, 1))
    assert digest_of((odd, 1)) != digest_of((odd, 2))


def test_identity_is_the_users_else_the_datasets_own() -> None:
    assert fingerprint(Named([1, 2])) == Fingerprint(2, "Named", "rows-2")
    assert fingerprint(Named([1, 2]), identity="mine") == Fingerprint(2, "Named", "mine")
    assert len(fingerprint(Rows([1]), identity="x" * 10_000).identity) == 32


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class OnlyIterable(torch.utils.data.IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(range(3))


class NoIndex:
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (NoLength(), "dataset NoLength has no length.*ShardedDataset"),
        (iter([1]), "has no length"),
        (NoIndex(), "dataset NoIndex can only be iterated.*__getitem__.*ShardedDataset"),
        (OnlyIterable(), "dataset OnlyIterable can only be iterated.*ShardedDataset"),
        ([], "dataset list has 0 samples"),
    ],
)
def test_dataset_without_length_or_index_is_refused_with_the_fix(dataset: Any, words: str) -> None:
    with pytest.raises(DatasetUnusable, match=words):
        fingerprint(dataset)
