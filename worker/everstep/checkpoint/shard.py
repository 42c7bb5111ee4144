"""Tensors in one safetensors file: where each one lies, the staging buffer that becomes the file, and checksums.

The file is laid out here rather than by the safetensors library because staging must copy each tensor once, straight
to its place in the file. Format: 8 bytes little-endian header length, a JSON header padded to 8 bytes, then the
tensors without gaps (https://github.com/huggingface/safetensors). Widest types come first, so that every tensor is
aligned.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from everstep.checkpoint.errors import Damaged, FormatError
from everstep.checkpoint.manifest import CHUNK_BYTES, DTYPE_BYTES, Entry, Piece, Shard
from everstep.checkpoint.tree import DTYPES, TORCH


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of one shard. `spans` are the byte ranges of the tensors in the file."""

    header: bytes
    spans: dict[str, tuple[int, int]]
    size: int


def assign(sizes: Mapping[str, int], world_size: int) -> list[list[str]]:
    """Which rank writes which tensor of a state that all ranks hold: by size in bytes, largest first, to the rank
    with the least so far. The same on every rank, without asking."""
    loads = [(0, rank) for rank in range(world_size)]
    owned: list[list[str]] = [[] for _ in range(world_size)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        load, rank = heapq.heappop(loads)
        owned[rank].append(name)
        heapq.heappush(loads, (load + max(1, sizes[name]), rank))
    return owned


def plan_shard(tensors: Mapping[str, torch.Tensor]) -> Plan:
    """Lay these tensors out in one file."""
    names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    fields, offset, ranges = {}, 0, {}
    for name in names:
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
    return Shard(path, len(data), CHUNK_BYTES, checksums(data, CHUNK_BYTES))


def checksums(data: bytes | bytearray | memoryview, chunk_bytes: int) -> tuple[str, ...]:
    """xxh3-128 of each chunk; one, of nothing, for an empty file."""
    view = memoryview(data)
    starts = range(0, max(1, len(view)), chunk_bytes)
    return tuple(xxhash.xxh3_128_hexdigest(view[start : start + chunk_bytes]) for start in starts)


def check_chunk(shard: Shard, index: int, data: bytes) -> None:
    """Raise `Damaged` unless `data` is chunk `index` of the shard."""
    expected = min(shard.chunk_bytes, shard.bytes - index * shard.chunk_bytes)
    if len(data) != expected:
        raise Damaged(f"{shard.path}: chunk {index} has {len(data)} bytes, the manifest says {expected}")
    if xxhash.xxh3_128_hexdigest(data) != shard.xxh3_128[index]:
        raise Damaged(f"{shard.path}: chunk {index} fails its checksum: the bytes were changed")


def entries_of(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> tuple[Entry, ...]:
    """The entries of a shard that holds each of its tensors whole."""
    entries = []
    for name in sorted(plan.spans):
        shape = tuple(tensors[name].shape)
        piece = Piece(0, name, (0,) * len(shape), shape, *plan.spans[name])
        entries.append(Entry(name, DTYPES[tensors[name].dtype], shape, (piece,)))
    return tuple(entries)


def assemble(entry: Entry, files: Sequence[bytearray]) -> torch.Tensor:
    """The logical tensor from its pieces in these verified files, in memory of its own."""
    dtype = TORCH.get(entry.dtype)
    if dtype is None or dtype.itemsize != DTYPE_BYTES[entry.dtype]:
        raise FormatError(f"{entry.name}: this torch has no type {entry.dtype}")
    result = torch.empty(entry.shape, dtype=dtype)
    for piece in entry.pieces:
        if math.prod(piece.shape):
            box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
            # Copied as bytes first: a foreign writer need not have aligned its tensors.
            source = bytearray(memoryview(files[piece.shard])[piece.begin : piece.end])
            result[box] = torch.frombuffer(source, dtype=dtype).view(piece.shape)
    return result
