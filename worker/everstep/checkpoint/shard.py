"""Tensors in one safetensors file: where each one lies, the staging buffer that becomes the file, and checksums.

The file is laid out here rather than by the safetensors library because staging must copy each tensor once, straight
to its place in the file. Format: 8 bytes little-endian header length, a JSON header padded to 8 bytes, then the
tensors without gaps (https://github.com/huggingface/safetensors). Widest types come first, so that every tensor is
aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import xxhash

from everstep.checkpoint.errors import Damaged, FormatError
from everstep.checkpoint.manifest import CHUNK_BYTES, DTYPE_BYTES, Entry, Piece, Shard
from everstep.checkpoint.portions import Slice
from everstep.checkpoint.tree import DTYPES, TORCH

# With at least so many chunks a shard, readers get even shares of it; with at least so many bytes a chunk, the store is
# not asked for crumbs.
CHUNKS: Final = 64
MIN_CHUNK_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of one shard. `spans` are the byte ranges of the tensors in the file."""

    header: bytes
    spans: dict[str, tuple[int, int]]
    size: int


def plan_shard(tensors: Mapping[str, torch.Tensor]) -> Plan:
    """Lay these tensors out in one file, in the order given but for their widths."""
    fields, offset, ranges = {}, 0, {}
    for name in sorted(tensors, key=lambda n: -tensors[n].element_size()):
        tensor = tensors[name]
        ranges[name] = (offset, offset + tensor.numel() * tensor.element_size())
        fields[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": list(ranges[name])}
        offset = ranges[name][1]
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    spans = {name: (begin + len(header), end + len(header)) for name, (begin, end) in ranges.items()}
    return Plan(header, spans, len(header) + offset)


class Staging:
    """One reused host buffer. Its content belongs to the caller of `fill` until the next `fill`."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def fill(self, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> bytearray:
        """The bytes of the shard: a snapshot of the tensors, which may change as soon as this returns."""
        if len(self._buffer) != plan.size:
            self._buffer = bytearray()  # freed before the new one is made: never two at once
            self._buffer = bytearray(plan.size)
        self._buffer[: len(plan.header)] = plan.header
        whole = torch.frombuffer(self._buffer, dtype=torch.uint8)
        for name, (begin, end) in plan.spans.items():
            if end > begin:
                tensor = tensors[name]
                whole[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return self._buffer


def describe(path: str, data: bytearray | bytes) -> Shard:
    """The manifest's description of a shard with these bytes."""
    chunk_bytes = chunk_bytes_for(len(data))
    return Shard(path, len(data), chunk_bytes, checksums(data, chunk_bytes))


def chunk_bytes_for(size: int) -> int:
    """How many bytes of a shard have one checksum: a power of two, at most `CHUNK_BYTES`, and small enough that readers
    can divide the shard evenly among them."""
    least = MIN_CHUNK_BYTES
    while least * CHUNKS < size and least < CHUNK_BYTES:
        least *= 2
    return least


def checksums(data: bytes | bytearray | memoryview, chunk_bytes: int) -> tuple[str, ...]:
    """xxh3-128 of each chunk; one, of nothing, for an empty file."""
    view = memoryview(data)
    starts = range(0, max(1, len(view)), chunk_bytes)
    return tuple(xxhash.xxh3_128_hexdigest(view[start : start + chunk_bytes]) for start in starts)


def check_chunk(shard: Shard, index: int, data: bytes | memoryview) -> None:
    """Raise `Damaged` unless `data` is chunk `index` of the shard."""
    expected = min(shard.chunk_bytes, shard.bytes - index * shard.chunk_bytes)
    if len(data) != expected:
        raise Damaged(f"{shard.path}: chunk {index} has {len(data)} bytes, the manifest says {expected}")
    if xxhash.xxh3_128_hexdigest(data) != shard.xxh3_128[index]:
        raise Damaged(f"{shard.path}: chunk {index} fails its checksum: the bytes were changed")


def entries_of(plan: Plan, slices: Sequence[Slice]) -> tuple[Entry, ...]:
    """The entries of a shard that holds these slices."""
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for s in slices:
        piece = Piece(0, s.key, s.box.offset, s.box.shape, *plan.spans[s.key])
        pieces.setdefault(s.name, []).append(piece)
        kinds[s.name] = (DTYPES[s.data.dtype], s.shape)
    return tuple(Entry(name, *kinds[name], tuple(pieces[name])) for name in sorted(pieces))


def torch_dtype(entry: Entry) -> torch.dtype:
    """The type of an entry's elements. Raises `FormatError` if this torch does not have it."""
    dtype = TORCH.get(entry.dtype)
    if dtype is None or dtype.itemsize != DTYPE_BYTES[entry.dtype]:
        raise FormatError(f"{entry.name}: this torch has no type {entry.dtype}")
    return dtype
