"""Numbers that nothing counts to, and values of every wrong kind, in every field of every message: refused by field.

JSON has numbers of any length, and Python reads them. So a field that is only checked for its type raises elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.contract.document import (
    Document,
    JoinRequest,
    Loss,
    Member,
    Seat,
    Setback,
    Sizes,
    decode,
    decode_join_request,
    encode,
)
from everstep.contract.document import Report as PairReport
from everstep.contract.fields import DocumentInvalid, short
from everstep.contract.messages import MessageError, Phase, Report
from everstep_operator.rounds.document_shape import SMALL, check_shape

HUGE = [10**400, -(10**400), 2**63, 2**64, -(2**63) - 1, 10**4000]
NO_NUMBERS = [float("inf"), float("-inf"), float("nan")]

FULL = Report(
    Phase.TRAIN, rank=0, world_size=2, at=100.0, round=1, step=5, total_steps=9, epoch=1, step_seconds=0.5,
    restored_step=1, restore_seconds=0.1, committed_step=4, committed_at=99.0, checkpoint_error="no", straggler="r1",
    rehearsed="2026-11-29",
    peak_memory=1, peak_device_memory=1, metrics={"loss": 0.5},
)  # fmt: skip
NUMBERS = sorted(f.name for f in fields(Report) if type(getattr(FULL, f.name)) in (int, float))
MEMBER = Member(0, "a", 0, 1, "10.0.0.1", 29500, 29501)
DOCUMENT = Document(
    sizes=Sizes(1, 3, (1, 2)), id="a", floor=1, round=2, members=(MEMBER,), gone=(Loss("b", "lost"),),
    joining=(Member(1, "c", 0, 1, "10.0.0.2", 1, 2),), seats=(Seat(0, "a", 0, ("z",)),),
    reports=(PairReport("a", "b", True, 1),), broken="b is lost", boundary=4, done=("a",), stopping=("b",), restarts=1,
    history=(Setback(1, "b", "lost", True),), closed="over",
)  # fmt: skip
JOIN = JoinRequest(MEMBER, 3, Sizes(1, 3, (1, 2)), patient=True)


@pytest.mark.parametrize("value", [*HUGE, *NO_NUMBERS, True, "1", [1], {"a": 1}], ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("name", NUMBERS)
def test_report_with_a_number_that_nothing_counts_to_is_refused_by_its_field(name: str, value: object) -> None:
    body = {**json.loads(FULL.encode()), name: value}
    with pytest.raises(MessageError, match=f"^{name}: .") as refused:
        Report.decode(json.dumps(body).encode())
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("value", [*HUGE, True, "1", None, [1]], ids=lambda v: str(v)[:24])
def test_metric_beyond_64_bits_is_refused_by_its_name(value: object) -> None:
    body = {**json.loads(FULL.encode()), "metrics": {"loss": value}}
    with pytest.raises(MessageError, match=r"^metrics\.loss: ."):
        Report.decode(json.dumps(body).encode())


def test_metric_that_is_no_finite_number_is_shown_as_it_is() -> None:
    """A loss that became NaN is what a person wants to see."""
    body = {**json.loads(FULL.encode()), "metrics": {"loss": float("inf")}}
    assert Report.decode(json.dumps(body).encode()).metrics == {"loss": float("inf")}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the leaves of a JSON value are."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if rows is None:
        return [path]
    return [p for key, inner in rows for p in [(*path, key), *places(inner, (*path, key))]]


def changed(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def refusal(read: Callable[[bytes], object], error: type[Exception], data: bytes) -> str:
    """Why it is refused; empty: it is read."""
    try:
        read(data)
    except error as e:
        return str(e)
    return ""


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.sampled_from(HUGE), st.integers(), st.floats(), st.text(max_size=20),
        st.just("\ud800"),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)  # fmt: skip
MESSAGES: list[tuple[bytes, Callable[[bytes], object], type[Exception]]] = [
    (FULL.encode(), Report.decode, MessageError),
    (encode(DOCUMENT), decode, DocumentInvalid),
    (encode(DOCUMENT), lambda data: check_shape(data + b" " * SMALL), DocumentInvalid),
    (JOIN.encode(), decode_join_request, DocumentInvalid),
]


# The field at each place of a row, where a message has rows in place of objects.
_SIZES: dict[Any, Any] = {0: "minimum", 1: "maximum", 2: "allowed"}
_MEMBER: dict[Any, Any] = {0: "index", 2: "incarnation", 3: "local_world_size", 5: "store_port", 6: "link_port"}
ROWS: dict[str, dict[Any, Any]] = {
    "sizes": _SIZES, "members": _MEMBER, "joining": _MEMBER, "seats": {0: "index", 2: "incarnation"},
    "reports": {3: "times"}, "history": {0: "round"},
}  # fmt: skip
JOIN = {0: {key: f"member.{name}" for key, name in _MEMBER.items()}, 1: "after", 2: _SIZES}


def field(path: tuple[Any, ...]) -> str:
    """How a refusal names the place."""
    if path[0] == "join":
        named = JOIN[path[1]]
        return f"presence.{named if isinstance(named, str) else named[path[2]]}"
    if path[0] in ROWS:
        return f"{path[0]}.{ROWS[path[0]][path[1 if path[0] == 'sizes' else 2]]}"
    return ".".join(map(str, path))


@pytest.mark.parametrize(
    ("message", "read", "error", "places_of_numbers"),
    [(*MESSAGES[0], 15), (*MESSAGES[1], 24), (*MESSAGES[3], 11)],
    ids=["report", "document", "join"],
)
@pytest.mark.parametrize("number", HUGE, ids=lambda v: str(v)[:24])
def test_number_beyond_64_bits_is_refused_by_its_field_wherever_a_number_stands(
    message: bytes, read: Callable[[bytes], object], error: type[Exception], places_of_numbers: int, number: int
) -> None:
    body = json.loads(message)
    tried = set[tuple[Any, ...]]()
    for path in places(body):
        value = body
        for key in path:
            value = value[key]
        if type(value) in (int, float):
            tried.add(path)
            # The version says of which form the others are.
            name = "presence" if path == ("version",) and "join" in body else field(path)
            with pytest.raises(error, match=f"^{re.escape(name)}: ."):
                read(json.dumps(changed(body, path, number)).encode())
    assert len(tried) == places_of_numbers


@pytest.mark.parametrize(("message", "read", "error"), MESSAGES, ids=["report", "document", "shape", "join"])
@given(data=st.data())
def test_message_with_any_value_in_any_place_is_read_or_refused_and_never_an_error_of_ours(
    message: bytes, read: Callable[[bytes], object], error: type[Exception], data: st.DataObject
) -> None:
    body = json.loads(message)
    path = data.draw(st.sampled_from(places(body)))
    sent = json.dumps(changed(body, path, data.draw(VALUES))).encode()
    assert len(refusal(read, error, sent).encode()) < 1000  # and it can be sent


@pytest.mark.parametrize(("message", "read", "error"), MESSAGES, ids=["report", "document", "shape", "join"])
@given(st.one_of(st.binary(max_size=200), VALUES.map(lambda v: json.dumps(v).encode())))
@example(b"[" * 16_000)
@example(b'{"phase":' + b"[" * 900 + b"]" * 900 + b"}")
@example(b'{"version":' + b"[" * 900 + b"]" * 900 + b"}")
@example(b'{"at":' + b"9" * 5000 + b"}")
@example(b'{"version":' + b"9" * 5000 + b"}")
@example(b'{"version":' + b"9" * 4000 + b"}")
def test_any_bytes_are_read_or_refused(
    message: bytes, read: Callable[[bytes], object], error: type[Exception], data: bytes
) -> None:
    assert len(refusal(read, error, data)) < 1000


def test_value_in_an_error_is_short_whatever_it_is() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, [1] * 10**6, {str(i): i for i in range(10**5)}, 10**4000, "\ud800"):
        assert len(short(value)) <= 80
    while deep:
        deep = deep.pop()
