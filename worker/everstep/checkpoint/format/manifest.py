"""The records of the commit log: what they hold, and what makes one valid. The commit record *is* the manifest.

Pure: no store, no torch, no clock. Invariant: a record that `decode_record` returns names only shards below `data/`,
its pieces tile every tensor exactly, each piece lies inside its shard and shares no bytes with another, and its values
can be decoded; so a reader may trust offsets, paths and references. How large a shard really is, only the store knows:
a reader compares that before it allocates.
The format is documented in docs/reference/commit-format.md and changes only with `VERSION`.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from everstep.checkpoint.errors import FormatError, UnsupportedVersion
from everstep.checkpoint.format import wire
from everstep.checkpoint.format.boxes import check_tiling
from everstep.checkpoint.format.layout import MAX_RECORD_NUMBER, folder_of, shard_name
from everstep.checkpoint.format.wire import Fields, Json

# --- values
# What the `values` of a commit may be, checked when a record is decoded. A load expects values as this writer makes
# them of a state. A record that another program made wrongly is refused here, with the error that makes a restore step
# over it. Invariant: in values that `check_values` passed, each key has a kind and a tree, each tag can be decoded, and
# each reference is to a tensor of the commit.

KINDS: Final = ("module", "stateful", "optimizer", "value")
FLOATS: Final = ("nan", "inf", "-inf")
_NOT_NUMPYS: Final = ("BF16", "F8_E4M3", "F8_E5M2")


def check_values(values: Json, dtypes: Mapping[str, str], where: str) -> None:
    """Raise `FormatError` naming the place. `dtypes`: of the commit's tensors, by name; {} for a compacted record."""
    if not isinstance(values, dict):
        raise FormatError(f"{where}: values is a {_type(values)}, not an object")
    _check_bodies(values.get("state", {}), dtypes, f"{where}: values: state")
    ranks = values.get("ranks", [])
    if not isinstance(ranks, list):
        raise FormatError(f"{where}: values: ranks is a {_type(ranks)}, not a list")
    for rank, bodies in enumerate(ranks):
        _check_bodies(bodies, dtypes, f"{where}: values: ranks[{rank}]")
    if not _is_list_of_texts(values.get("nonfinite", [])):
        raise FormatError(f"{where}: values: nonfinite is not a list of texts")
    metrics = values.get("metrics", {})
    if not isinstance(metrics, dict) or not all(_is_number(value) for value in metrics.values()):
        raise FormatError(f"{where}: values: metrics is not an object of numbers")


def _check_bodies(bodies: Json, dtypes: Mapping[str, str], where: str) -> None:
    if not isinstance(bodies, dict):
        raise FormatError(f"{where} is a {_type(bodies)}, not an object")
    for key, body in bodies.items():
        at = f"{where}[{key[:80]!r}]"
        if not isinstance(body, dict) or "tree" not in body:
            raise FormatError(f"{at} is not an object with a tree")
        kind, tree = body.get("kind"), body["tree"]
        if kind not in KINDS:
            raise FormatError(f"{at}: kind {str(kind)[:40]!r} is none of {', '.join(KINDS)}")
        if not isinstance(body.get("class", ""), str) or not isinstance(body.get("union", False), bool):
            raise FormatError(f"{at}: class is not a text, or union is neither true nor false")
        if "names" in body and not _is_list_of_texts(body["names"]):
            raise FormatError(f"{at}: names is not a list of texts")
        if kind in ("module", "optimizer") and not isinstance(tree, dict):
            raise FormatError(f"{at}: the tree of a {kind} is a {_type(tree)}, not an object")
        if kind == "optimizer":
            _check_optimizer(tree, at)
        _check_tree(tree, dtypes, at)
        _check_tree(body.get("metadata"), {}, f"{at}: metadata")


def _check_optimizer(tree: Json, at: str) -> None:
    """The tree of an optimizer that was saved by the names of its parameters."""
    for part in ("state", "param_groups"):
        named = tree.get(part) if isinstance(tree, dict) else None
        if not isinstance(named, dict) or not all(isinstance(value, dict) for value in named.values()):
            raise FormatError(f"{at}: {part} of an optimizer's tree is not an object of objects")


def _check_tree(tree: Json, dtypes: Mapping[str, str], at: str) -> None:
    """Depth is bounded by the record's."""
    if isinstance(tree, list):
        for value in tree:
            _check_tree(value, dtypes, at)
    elif isinstance(tree, dict):
        tag = next((key for key in tree if key.startswith("$")), None)
        if tag is None:
            for value in tree.values():
                _check_tree(value, dtypes, at)
        elif len(tree) > 1 or not _is_tagged(tag, tree[tag], dtypes, at):
            raise FormatError(f"{at}: {tag[:40]} {str(tree[tag])[:80]!r} cannot be decoded")


def _is_tagged(tag: str, body: Json, dtypes: Mapping[str, str], at: str) -> bool:
    match tag, body:
        case "$float", str():
            return body in FLOATS
        case "$tensor", str():
            return body in dtypes
        case "$ndarray", str():
            return dtypes.get(body, "BF16") not in _NOT_NUMPYS
        case "$bytes", str():
            try:
                base64.b64decode(body, validate=True)
            except (binascii.Error, ValueError):
                return False
            return True
        case "$tuple", list():
            _check_tree(body, dtypes, at)
            return True
        case "$dict", list():
            for pair in body:
                if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]):
                    return False
                _check_tree(pair[0], dtypes, at)
                _check_tree(pair[1], dtypes, at)
            return True
    return False


def _is_key(key: Json) -> bool:
    """Whether it decodes to what a mapping can have for a key."""
    if isinstance(key, dict) and len(key) == 1:
        ((tag, body),) = key.items()
        return tag in ("$float", "$bytes", "$tensor") or (
            tag == "$tuple" and isinstance(body, list) and all(_is_key(item) for item in body)
        )
    return not isinstance(key, dict | list)


def _is_list_of_texts(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_number(value: Json) -> bool:
    """An integer may be larger than any floating-point number, and could not be compared with one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _type(value: Json) -> str:
    return {list: "list", dict: "object", str: "text", type(None): "null"}.get(type(value), type(value).__name__)


# --- compaction
# A log record that keeps its place and loses its body: what bounds the bytes of the log. A commit record grows with the
# state: one entry a piece. Once the shards of a commit are deleted nothing can be read by that description, but the
# record's place still matters: records are created at last + 1, so a number that became free could be taken again by a
# writer that slept, behind the back of everybody else (docs/adr/0019). So compaction deletes no record. It replaces a
# record by a short one with the same number, links and writer. Invariant: every decision of `log` about a compacted
# record is the one about the record that it was; and readers of any release see a commit whose shard is missing, never
# an empty state.

# A compacted record is smaller than this, because its texts are ids and a time. A larger record is worth compacting.
SMALL_BYTES: Final = 1024

_SUM_OF_NOTHING: Final = "99aa06d3014798d86001c324468d497f"  # XXH3 128 of no bytes


def compacted(record: CommitRecord) -> CommitRecord:
    """The record without the description of its state. It names one shard, of no bytes, which never exists: a file of
    tensors has a header."""
    nothing = Shard(shard_name(record.save_id, 0), 0, CHUNK_BYTES, (_SUM_OF_NOTHING,))
    return replace(record, shards=(nothing,), entries=(), values={})


def is_compacted(record: Record) -> bool:
    """Whether the record is the short form that `compacted` makes."""
    return isinstance(record, CommitRecord) and [s.bytes for s in record.shards] == [0] and not record.entries


# --- times
# The format of times in records.


def stamp(seconds: float) -> str:
    """RFC 3339 in UTC of a time in seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- manifest

VERSION: Final = 1
NONE: Final = -1  # "no such record" in `open` and `commit`
MAX_STEP: Final = 2**62
CHUNK_BYTES: Final = 64 * 2**20
MAX_AXES: Final = 64  # as torch's own
MAX_ELEMENTS: Final = 2**59  # of at most 8 bytes; axes of length 0 count as 1, as strides are computed of them

# Bytes of one element, by safetensors' name of the type.
DTYPE_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Owner:
    """A job or rendezvous that has opened the log, and the highest round in which it did.

    `created` is when the job was created, in seconds since the epoch; 0 is not known. `rendezvous` names the count of
    rounds that `round` belongs to; "" if the job's operator counts them.
    """

    job_uid: str
    round: int
    created: int = 0
    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """`writer` starts to train and takes the log; every earlier writer is fenced from here on."""

    n: int
    writer: str
    round: int
    job_uid: str  # "" outside Kubernetes
    world_size: int
    at: str
    owners: tuple[Owner, ...]  # in order of take-over, this one last; a plain run, which has no rounds, is never in it
    open: int  # the open record before this one, or NONE
    commit: int  # the newest commit below, or NONE
    rendezvous: str = ""  # as in `Owner`
    former: tuple[str, ...] = ()  # sorted; 16 hex digits each for owners that `owners` has no room for any more


@dataclass(frozen=True, slots=True)
class Shard:
    """One immutable file of tensors, with the xxh3-128 of each `chunk_bytes` of it (the last may be shorter)."""

    path: str
    bytes: int
    chunk_bytes: int
    xxh3_128: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: where it lies in the whole, and at which bytes of which shard."""

    shard: int
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A logical tensor and the pieces that tile it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A checkpoint. It exists from the moment this object does, and not before."""

    n: int
    writer: str
    round: int
    job_uid: str
    step: int
    save_id: str
    world_size: int
    at: str
    open: int  # the writer's own open record; valid only if no other open lies between
    commit: int  # the newest commit below, or NONE
    shards: tuple[Shard, ...]
    entries: tuple[Entry, ...]  # sorted by name
    values: Json  # the state's tree; tensors are references to entries

    @property
    def bytes(self) -> int:
        """Of all its shards."""
        return sum(shard.bytes for shard in self.shards)


Record = OpenRecord | CommitRecord


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a save: its shard, the entries in it, and the values that only this rank has."""

    rank: int
    save_id: str
    shard: Shard | None
    entries: tuple[Entry, ...]  # pieces point at shard 0
    values: Json
    nonfinite: tuple[str, ...] = ()  # parameters in it that hold NaN or infinity
    digests: dict[str, int] = field(default_factory=dict)  # of its replicated state, by key, where ranks compare it
    union: dict[str, Json] = field(default_factory=dict)  # this rank's content of unions, by key
    union_digests: dict[str, int] = field(default_factory=dict)  # of tensors of unions that several ranks hold
    step: int = NONE  # of the state; NONE if the description does not say it


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A rank will not write its part of a save."""

    rank: int
    save_id: str
    reason: str


def nonfinite_in(record: CommitRecord) -> tuple[str, ...]:
    """The parameters that hold NaN or infinity in a commit that was marked for them. No run goes on from such a one."""
    names = record.values.get("nonfinite") if isinstance(record.values, dict) else None
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def encode_record(record: Record) -> bytes:
    """The bytes of the log object. Equal records have equal bytes."""
    match record:
        case OpenRecord():
            body: dict[str, Json] = {"version": VERSION, "n": record.n, "kind": "open", **asdict(record)}
            if not record.former:
                del body["former"]
        case CommitRecord():
            body = {
                "version": VERSION, "n": record.n, "kind": "commit", "writer": record.writer, "round": record.round,
                "job_uid": record.job_uid, "step": record.step, "save_id": record.save_id,
                "world_size": record.world_size, "at": record.at, "open": record.open, "commit": record.commit,
                "shards": [_shard_body(s) for s in record.shards],
                "entries": {e.name: _entry_body(e) for e in record.entries}, "values": record.values,
            }  # fmt: skip
    return wire.encode(body)


def decode_record(data: bytes, n: int, where: str) -> Record:
    """Record `n` from its bytes. Raises `FormatError` (damaged) or `UnsupportedVersion` (of a newer library)."""
    fields = Fields(wire.decode(data, where), where)
    _check_version(fields)
    if fields.integer("n") != n:
        raise FormatError(f"{where}: holds record {fields.integer('n')}: the object was swapped with another")
    kind = fields.text("kind")
    if kind == "open":
        owners = tuple(
            Owner(o.text("job_uid"), o.integer("round"), o.integer("created"), o.text("rendezvous"))
            for o in fields.objects("owners")
        )
        return OpenRecord(
            n, fields.text("writer"), fields.integer("round"), fields.text("job_uid"), fields.integer("world_size", 1),
            fields.text("at"), owners, _link(fields, "open", n), _link(fields, "commit", n),
            fields.text("rendezvous"), _former(fields),
        )  # fmt: skip
    if kind != "commit":
        raise FormatError(f"{where}: kind {kind!r} is neither open nor commit")
    shards = tuple(_shard(f) for f in fields.objects("shards"))
    if len({shard.path for shard in shards}) < len(shards):
        raise FormatError(f"{where}: two of its shards have one path")
    entries = _entries(fields, shards)
    check_values(fields.any("values"), {e.name: e.dtype for e in entries}, where)
    return CommitRecord(
        n, fields.text("writer"), fields.integer("round"), fields.text("job_uid"), fields.integer("step"),
        fields.text("save_id", 128), fields.integer("world_size", 1), fields.text("at"),
        _link(fields, "open", n), _link(fields, "commit", n), shards, entries, fields.any("values"),
    )  # fmt: skip


def encode_part(part: Part | PartFailed) -> bytes:
    """The bytes of a part's description."""
    body: dict[str, Json] = {"version": VERSION, "kind": "part", "rank": part.rank, "save_id": part.save_id}
    match part:
        case PartFailed():
            body["failed"] = part.reason[:500]
        case Part():
            body |= {
                "step": part.step, "shard": _shard_body(part.shard) if part.shard else None,
                "entries": {e.name: _entry_body(e) for e in part.entries}, "values": part.values,
                "nonfinite": list(part.nonfinite), "digests": dict(part.digests), "union": dict(part.union),
                "held": dict(part.union_digests),
            }  # fmt: skip
    return wire.encode(body)


def decode_part(data: bytes, rank: int, save_id: str, where: str) -> Part | PartFailed:
    """The description that `rank` wrote for `save_id`; its entries need not tile their tensors yet."""
    fields = Fields(wire.decode(data, where), where)
    _check_version(fields)
    if fields.integer("rank") != rank or fields.text("save_id") != save_id:
        raise FormatError(f"{where}: is the part of another rank or save")
    if fields.has("failed"):
        return PartFailed(rank, save_id, fields.text("failed"))
    shard = None if fields.any("shard") is None else _shard(Fields(fields.any("shard"), f"{where}: shard"))
    shards = (shard,) if shard else ()
    entries = tuple(_entry(name, Fields(body, f"{where}: {name}"), shards) for name, body in _sorted(fields))
    bad = tuple(str(name) for name in fields.items("nonfinite"))
    return Part(
        rank, save_id, shard, entries, fields.any("values"), bad, _integers(fields, "digests"),
        fields.mapping("union"), _integers(fields, "held"), fields.integer("step", NONE),
    )  # fmt: skip


def _integers(fields: Fields, name: str) -> dict[str, int]:
    """The object of integers in this field."""
    integers = Fields(fields.any(name), f"{fields.where}: {name}")
    return {key: integers.integer(key) for key in integers.names()}


def merge_parts(parts: Sequence[Part]) -> tuple[tuple[Shard, ...], tuple[Entry, ...]]:
    """The manifest's shards and entries from every rank's part, in rank order.

    Raises `FormatError` if two ranks disagree about a tensor, or the pieces do not tile it: a state that was not the
    same on all ranks must not become a commit.
    """
    shards: list[Shard] = []
    merged: dict[str, Entry] = {}
    for part in parts:
        for entry in part.entries:
            pieces = tuple(Piece(len(shards), p.key, p.offset, p.shape, p.begin, p.end) for p in entry.pieces)
            before = merged.get(entry.name)
            if before is None:
                merged[entry.name] = Entry(entry.name, entry.dtype, entry.shape, pieces)
            elif (before.dtype, before.shape) != (entry.dtype, entry.shape):
                raise FormatError(
                    f"{entry.name}: rank {part.rank} has {entry.dtype} {entry.shape}, "
                    f"an earlier rank {before.dtype} {before.shape}: the state is not the same on all ranks"
                )
            else:
                merged[entry.name] = Entry(entry.name, entry.dtype, entry.shape, before.pieces + pieces)
        if part.shard:
            shards.append(part.shard)
    entries = tuple(merged[name] for name in sorted(merged))
    for entry in entries:
        try:
            check_tiling(entry.shape, entry.pieces, entry.name)
        except FormatError as e:
            raise FormatError(
                f"{e}. If ranks hold other names, or the same part on meshes that do not tell it (a norm under FSDP "
                "beside tensor parallelism), mark the object with everstep.Union"
            ) from e
    return tuple(shards), entries


def _check_version(fields: Fields) -> None:
    version = fields.integer("version", 1)
    if version != VERSION:
        raise UnsupportedVersion(
            f"{fields.where}: format version {version}; this everstep reads version {VERSION}. Install a newer everstep"
        )


def _former(fields: Fields) -> tuple[str, ...]:
    former = fields.items("former") if fields.has("former") else []
    if not all(isinstance(mark, str) and len(mark) == 16 for mark in former):
        raise FormatError(f"{fields.where}: former is not a list of texts of 16 hex digits")
    return tuple(str(mark) for mark in former)


def _link(fields: Fields, name: str, n: int) -> int:
    return fields.integer(name, NONE, min(n - 1, MAX_RECORD_NUMBER))


def _sorted(fields: Fields) -> list[tuple[str, Json]]:
    return sorted(fields.mapping("entries").items())


def _entries(fields: Fields, shards: tuple[Shard, ...]) -> tuple[Entry, ...]:
    entries = tuple(_entry(name, Fields(body, f"{fields.where}: {name}"), shards) for name, body in _sorted(fields))
    for entry in entries:
        check_tiling(entry.shape, entry.pieces, f"{fields.where}: {entry.name}")
    _check_bytes(entries, fields.where)
    return entries


def _check_bytes(entries: tuple[Entry, ...], where: str) -> None:
    """Raise `FormatError` if two pieces share bytes of a shard: then a small file could claim any number of tensors."""
    runs: dict[int, list[tuple[int, int, str]]] = {}
    for entry in entries:
        for piece in entry.pieces:
            if piece.end > piece.begin:
                runs.setdefault(piece.shard, []).append((piece.begin, piece.end, entry.name))
    for intervals in runs.values():
        intervals.sort()
        for (_, end, name), (begin, _, other) in pairwise(intervals):
            if begin < end:
                raise FormatError(f"{where}: pieces of {name[:80]!r} and {other[:80]!r} share bytes of their shard")


def _shard_body(shard: Shard) -> dict[str, Json]:
    return {
        "path": shard.path, "bytes": shard.bytes, "chunk_bytes": shard.chunk_bytes, "xxh3_128": list(shard.xxh3_128)
    }  # fmt: skip


def _shard(fields: Fields) -> Shard:
    path, size = fields.text("path"), fields.integer("bytes")
    if folder_of(path) is None:
        raise FormatError(f"{fields.where}: path {path!r} is not of the form data/<save id>/<file>")
    chunk = fields.integer("chunk_bytes", 1)
    sums = fields.items("xxh3_128")
    if len(sums) != max(1, -(-size // chunk)) or not all(_is_sum(s) for s in sums):
        raise FormatError(f"{fields.where}: xxh3_128 does not hold one checksum for each {chunk} of {size} bytes")
    return Shard(path, size, chunk, tuple(str(s) for s in sums))


def _is_sum(value: Json) -> bool:
    return isinstance(value, str) and len(value) == 32 and all(c in "0123456789abcdef" for c in value)


def _entry_body(entry: Entry) -> dict[str, Json]:
    return {
        "dtype": entry.dtype, "shape": list(entry.shape),
        "pieces": [
            {
                "shard": p.shard, "key": p.key, "offset": list(p.offset), "shape": list(p.shape),
                "begin": p.begin, "end": p.end,
            }
            for p in entry.pieces
        ],
    }  # fmt: skip


def _entry(name: str, fields: Fields, shards: Sequence[Shard]) -> Entry:
    dtype, shape = fields.text("dtype"), fields.integers("shape")
    if dtype not in DTYPE_BYTES:
        raise FormatError(f"{fields.where}: unknown dtype {dtype[:40]!r}")
    if len(shape) > MAX_AXES:
        raise FormatError(f"{fields.where}: {len(shape)} axes; at most {MAX_AXES} are allowed")
    if math.prod(max(1, n) for n in shape) > MAX_ELEMENTS:
        raise FormatError(f"{fields.where}: shape {str(shape)[:80]} has more elements than memory has addresses")
    return Entry(name, dtype, shape, tuple(_pieces(fields, dtype, shape, shards)))


def _pieces(fields: Fields, dtype: str, whole: tuple[int, ...], shards: Sequence[Shard]) -> Iterable[Piece]:
    for f in fields.objects("pieces"):
        piece = Piece(
            f.integer("shard", 0, len(shards) - 1), f.text("key", 4096), f.integers("offset"), f.integers("shape"),
            f.integer("begin"), f.integer("end"),
        )  # fmt: skip
        if len(piece.offset) != len(whole) or len(piece.shape) != len(whole):
            raise FormatError(f"{f.where}: has another number of axes than its tensor")
        if any(o + s > w for o, s, w in zip(piece.offset, piece.shape, whole, strict=True)):
            raise FormatError(f"{f.where}: lies outside its tensor of shape {whole}")
        if piece.end - piece.begin != math.prod(piece.shape) * DTYPE_BYTES[dtype]:
            raise FormatError(f"{f.where}: {piece.end - piece.begin} bytes do not hold {dtype} {piece.shape}")
        if piece.end > shards[piece.shard].bytes:
            raise FormatError(f"{f.where}: ends after its shard")
        yield piece
