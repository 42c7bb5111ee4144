"""Tensors in one safetensors file: where each one lies.

The file is laid out here rather than by the safetensors library because staging must copy each tensor once, straight
to its place in the file. Format: 8 bytes little-endian header length, a JSON header padded to 8 bytes, then the
tensors without gaps (https://github.com/huggingface/safetensors). Widest types come first, so that every tensor is
aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.checkpoint.errors import FormatError
from everstep.checkpoint.format.manifest import DTYPE_BYTES, Entry, Piece
from everstep.checkpoint.save.portions import Slice
from everstep.checkpoint.state.tree import DTYPES, TORCH


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
