"""The commit format: what is written comes back equal, and nothing that was changed is believed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.checkpoint.errors import FormatError, UnsupportedVersion
from everstep.checkpoint.format.layout import record_name
from everstep.checkpoint.format.manifest import (
    CommitRecord,
    Entry,
    OpenRecord,
    Owner,
    Part,
    PartFailed,
    Piece,
    Shard,
    decode_part,
    decode_record,
    encode_part,
    encode_record,
    merge_parts,
)

SUM = "0" * 32
SHARD = Shard("data/000000000000-aaaaaaaa-00000001/00000.safetensors", 1024, 64 * 2**20, (SUM,))
ENTRY = Entry("model/weight", "F32", (4, 2), (Piece(0, "model/weight", (0, 0), (4, 2), 512, 544),))
COMMIT = CommitRecord(
    3, "aaaaaaaa", 2, "uid", 40, "000000000000-aaaaaaaa-00000001", 2, "2026-11-21T00:00:00.000Z", 0, 2,
    (SHARD,), (ENTRY,), {"state": {"epoch": {"kind": "value", "tree": 3}}},
)  # fmt: skip
OPEN = OpenRecord(2, "bbbb", 5, "uid", 4, "2026-11-21T00:00:00.000Z", (Owner("uid", 5),), 0, 1)


def sealed(body: object) -> bytes:
    """The bytes of a record with this body, checksum included: what a hostile writer can make."""
    line = json.dumps(body).encode()
    return line + b'\n{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(line).encode() + b'"}\n'


def body_of(record: CommitRecord | OpenRecord) -> dict[str, object]:
    body = json.loads(encode_record(record).split(b"\n")[0])
    assert isinstance(body, dict)
    return body


def read(data: bytes, n: int = 3) -> object:
    return decode_record(data, n, record_name(n))


def test_records_come_back_equal_and_encode_to_the_same_bytes() -> None:
    for record in (COMMIT, OPEN):
        data = encode_record(record)
        assert read(data, record.n) == record
        assert encode_record(read(data, record.n)) == data  # type: ignore[arg-type]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(max_size=8).filter(lambda key: not key.startswith("$")), inner, max_size=4
    ),
    max_leaves=20,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no finding
@given(json_values, st.integers(0, 2**40), st.text(max_size=30))
def test_any_values_come_back_equal(values: object, step: int, uid: str) -> None:
    state = {"state": {"any": {"kind": "value", "tree": values}}}
    record = replace(COMMIT, values=state, step=step, job_uid=uid)  # type: ignore[arg-type]
    assert read(encode_record(record)) == record


def test_every_single_byte_change_and_every_cut_is_detected() -> None:
    data = encode_record(COMMIT)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x01
        with pytest.raises(FormatError):
            read(bytes(flipped))
        with pytest.raises(FormatError):
            read(data[:position])


def test_record_under_another_number_is_detected_as_swapped() -> None:
    with pytest.raises(FormatError, match="swapped"):
        read(encode_record(COMMIT), 4)


def test_newer_version_is_an_error_that_says_so() -> None:
    with pytest.raises(UnsupportedVersion, match=r"version 2.*newer everstep"):
        read(sealed(body_of(COMMIT) | {"version": 2}))


@pytest.mark.parametrize(
    "path",
    ["../../etc/passwd", "/etc/passwd", "data/../log/000000000000.json", "log/000000000000.json", "data/x",
     "data/x/y/z", "data//x", "data/x/..", "data/./x", "s3://other/x", "data/x/y\n", "probe/conditional-create"],
)  # fmt: skip
def test_path_that_leaves_the_data_folder_is_refused(path: str) -> None:
    body = body_of(COMMIT)
    body["shards"][0]["path"] = path  # type: ignore[index]
    with pytest.raises(FormatError, match="path"):
        read(sealed(body))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"offset": [1, 0]}, "outside"),
        ({"shape": [3, 2]}, "bytes do not hold"),
        ({"begin": 0, "end": 2000}, "bytes do not hold"),
        ({"begin": 1000, "end": 1032}, "after its shard"),
        ({"shard": 1}, "shard"),
        ({"shard": -1}, "shard"),
        ({"offset": [0]}, "axes"),
        ({"begin": 512.0}, "begin"),
        ({"begin": True}, "begin"),
    ],
)
def test_piece_that_does_not_fit_is_refused(change: dict[str, object], text: str) -> None:
    body = body_of(COMMIT)
    body["entries"]["model/weight"]["pieces"][0] |= change  # type: ignore[index]
    with pytest.raises(FormatError, match=text):
        read(sealed(body))


def test_pieces_that_overlap_or_leave_a_hole_are_refused() -> None:
    body = body_of(COMMIT)
    first, second = {"begin": 0, "end": 16, "shape": [2, 2]}, {"begin": 16, "end": 32, "shape": [2, 2]}
    base = {"shard": 0, "key": "model/weight"}
    entry = body["entries"]["model/weight"]  # type: ignore[index]
    entry["pieces"] = [base | first | {"offset": [0, 0]}, base | second | {"offset": [2, 0]}]
    read(sealed(body))
    entry["pieces"][1]["offset"] = [1, 0]
    with pytest.raises(FormatError, match="overlap"):
        read(sealed(body))
    entry["pieces"] = entry["pieces"][:1]
    with pytest.raises(FormatError, match="4 of 8 elements"):
        read(sealed(body))


@pytest.mark.parametrize("name", ["n", "kind", "writer", "step", "shards", "entries", "values", "open", "commit", "at"])
def test_missing_field_is_named(name: str) -> None:
    body = body_of(COMMIT)
    del body[name]
    with pytest.raises(FormatError, match=name):
        read(sealed(body))


@pytest.mark.parametrize(
    ("change", "text"),
    [({"step": -1}, "step"), ({"step": "4"}, "step"), ({"kind": "other"}, "kind"), ({"open": 3}, "open"),
     ({"commit": 7}, "commit"), ({"shards": {}}, "shards"), ({"entries": []}, "entries")],
)  # fmt: skip
def test_field_of_another_type_is_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        read(sealed(body_of(COMMIT) | change))


def test_nesting_beyond_the_bound_is_refused_however_deep() -> None:
    for depth in (100, 100_000):
        line = b'{"version":1,"values":' + b"[" * depth + b"]" * depth + b"}"
        data = line + b'\n{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(line).encode() + b'"}\n'
        with pytest.raises(FormatError, match=r"nested|JSON"):
            read(data)


def test_nan_in_the_json_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_record(replace(COMMIT, values={"x": float("nan")}))
    line = encode_record(COMMIT).split(b"\n")[0].replace(b'"tree":3', b'"tree":NaN')
    with pytest.raises(FormatError, match="NaN"):
        read(line + b'\n{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(line).encode() + b'"}\n')


def test_parts_come_back_equal_and_merge_in_rank_order() -> None:
    half = Shard("data/s/00001.safetensors", 64, 64 * 2**20, (SUM,))
    parts = [
        Part(0, "s", SHARD, (ENTRY,), {}),
        Part(1, "s", None, (), {"rng": {"kind": "stateful", "tree": 1}}),
        Part(2, "s", half, (Entry("b", "U8", (8,), (Piece(0, "b", (0,), (8,), 0, 8),)),), {}),
    ]
    for part in parts:
        assert decode_part(encode_part(part), part.rank, "s", "x") == part
    shards, entries = merge_parts(parts)
    assert shards == (SHARD, half)
    assert [(e.name, e.pieces[0].shard) for e in entries] == [("b", 1), ("model/weight", 0)]


def test_part_of_another_rank_or_save_is_refused() -> None:
    data = encode_part(PartFailed(1, "s", "disk full"))
    assert decode_part(data, 1, "s", "x") == PartFailed(1, "s", "disk full")
    for rank, save in ((2, "s"), (1, "t")):
        with pytest.raises(FormatError, match="another rank or save"):
            decode_part(data, rank, save, "x")


def test_ranks_that_disagree_about_a_tensor_make_no_commit() -> None:
    other = Entry("model/weight", "F32", (4, 3), (Piece(0, "model/weight", (0, 0), (4, 3), 0, 48),))
    with pytest.raises(FormatError, match="not the same on all ranks"):
        merge_parts([Part(0, "s", SHARD, (ENTRY,), {}), Part(1, "s", SHARD, (other,), {})])
    with pytest.raises(FormatError, match="16 of 8 elements"):
        merge_parts([Part(0, "s", SHARD, (ENTRY,), {}), Part(1, "s", SHARD, (ENTRY,), {})])


def test_example_in_the_reference_is_a_valid_record() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/commit-format.md").read_text()
    blocks = [b.split("```")[0] for b in text.split("```json\n")[1:]]
    records = [json.loads(b) for b in blocks if '"kind": "commit"' in b or '"kind": "open"' in b]
    assert [r["kind"] for r in records] == ["open", "commit"]
    for body in records:
        assert decode_record(sealed(body), body["n"], "example")
