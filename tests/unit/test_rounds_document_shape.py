"""The cheap look at a document before it is read: it refuses nothing that is one, and ends early at what is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.contract.document import (
    MAX_BYTES,
    Document,
    DocumentInvalid,
    Loss,
    Member,
    Report,
    Seat,
    Setback,
    Sizes,
    decode,
    encode,
)
from everstep_operator.rounds import document_shape
from everstep_operator.rounds.document_shape import SMALL, check_shape

NAMES = st.from_regex(r"[a-z0-9._-]{1,8}", fullmatch=True)
TEXTS = st.text(max_size=20)
MEMBERS = st.builds(
    Member, st.integers(-1, 9), NAMES, st.integers(0, 9), st.integers(1, 8), TEXTS, st.integers(0, 9), st.integers(0, 9)
)
MANY = st.lists(MEMBERS, max_size=4, unique_by=lambda member: member.agent).map(tuple)


def tuples(kind: type[object], *fields: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(st.builds(kind, *fields), max_size=3).map(tuple)


DOCUMENTS = st.builds(
    Document,
    st.sampled_from([Sizes(1, 2), Sizes(2, 8, (2, 4, 8))]),
    round=st.integers(0, 99),
    members=MANY,
    joining=MANY,
    gone=tuples(Loss, NAMES, TEXTS),
    seats=st.lists(st.builds(Seat, st.integers(0, 9), NAMES, st.integers(0, 9), st.lists(NAMES, max_size=3).map(tuple)),
                   max_size=3, unique_by=lambda seat: seat.index).map(tuple),
    reports=tuples(Report, NAMES, NAMES, st.booleans(), st.integers(0, 9)),
    broken=st.none() | TEXTS,
    boundary=st.none() | st.integers(0, 9),
    done=st.lists(NAMES, max_size=3).map(tuple),
    stopping=st.lists(NAMES, max_size=3).map(tuple),
    in_process=st.booleans(),
    ruled=st.booleans(),
    restarts=st.integers(0, 9),
    history=tuples(Setback, st.integers(0, 9), NAMES, TEXTS, st.booleans()),
    closed=st.none() | TEXTS,
)  # fmt: skip

LARGE = Document(
    Sizes(1, 4096),
    round=3,
    members=tuple(Member(i, f"agent-{i:05}", address="10.244.100.200", store_port=1) for i in range(4096)),
    seats=tuple(Seat(i, f"agent-{i:05}", 0) for i in range(4096)),
)


@settings(max_examples=100)
@given(DOCUMENTS)
def test_every_document_has_the_shape(document: Document) -> None:
    data = encode(document)
    assert decode(data) == document
    document_shape._DOCUMENT.decode(data)
    newer = json.dumps({**json.loads(data), "of_a_newer_release": {"deep": [1, {"x": None}]}}).encode()
    document_shape._DOCUMENT.decode(newer)


def test_large_document_has_the_shape() -> None:
    data = encode(LARGE)
    assert len(data) > SMALL
    check_shape(data)


BAD = [
    b"[" + b"1," * 500_000 + b"1]",
    b"[" + b"{}," * 340_000 + b"{}]",
    b"[" * 1_000_000,
    b'{"members":[' + b'"a",' * 250_000 + b'"a"]}',
    b'{"members":[' + b'"a",' * 250_000,
    b"{" + b",".join(b'"k%d":0' % i for i in range(90_000)) + b"}",
    b'{"x":' + b"[" * 900_000,
    b'{"x":"' + b"y" * 900_000,
    encode(LARGE)[:-1],
    encode(LARGE).replace(b"10.244.100.200", b'"', 1),
    b"\xff" * 900_000,
    b"\x00" * 900_000,
]


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_megabyte_that_is_no_document_is_refused_without_building_it(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SMALL < len(data) <= MAX_BYTES
    built = 0
    plain = json.loads

    def loads(text: bytes) -> object:
        nonlocal built
        built += len(text)
        return plain(text)

    monkeypatch.setattr(json, "loads", loads)
    with pytest.raises(DocumentInvalid) as refusal:
        check_shape(data)
    assert built == 0
    assert 5 < len(str(refusal.value)) < 300


def test_document_of_another_release_is_refused_for_that() -> None:
    body = {"version": 2, "rounds": ["x" * 100] * 400}
    with pytest.raises(DocumentInvalid, match=r"version: 2 is not 1.*releases"):
        check_shape(json.dumps(body).encode())


def test_small_one_is_left_to_the_contract_which_names_the_field() -> None:
    check_shape(b'{"version":1}')
    with pytest.raises(DocumentInvalid, match="sizes"):
        decode(b'{"version":1}')
