"""Tensors in one safetensors file: where each one lies.

The file is laid out here rather than by the safetensors library because staging must copy each tensor once, straight
to its place in the file. Format: 8 bytes little-endian header length, a JSON header padded to 8 bytes, then the
tensors without gaps (https://github.com/huggingface/safetensors). Widest types come first, so that every tensor is
aligned.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.checkpoint.errors import FormatError
from everstep.checkpoint.format.boxes import Box, Item, moved, share, text, whole
from everstep.checkpoint.format.manifest import DTYPE_BYTES, Entry, Piece
from everstep.checkpoint.state.sharding import holding, is_sharded
from everstep.checkpoint.state.tree import DTYPES, TORCH

# --- portions
# Decides what one rank writes of a state: an even share of what several ranks hold alike, and all that only it holds.
# If ranks may hold different values and one of them is saved, rank 0 writes it, whole. Decided without asking another
# rank, from what all of them know: shapes, placements and the ranks' order; of a union, also which ranks hold what.
# Invariant: the slices of all ranks tile every tensor exactly once.


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of the tensor `name` of shape `shape`, whose content is `data`, a view of the live one."""

    name: str
    shape: tuple[int, ...]
    box: Box
    data: torch.Tensor

    @property
    def key(self) -> str:
        """Its name in the file: the tensor's, with the box where it is only a part."""
        return self.name if self.box == whole(self.shape) else self.name + text(self.box)


@dataclass(frozen=True, slots=True)
class _LocalPart:
    """This rank's part `local` of a tensor of shape `shape`: the elements in `box`."""

    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor


def slices(
    shared: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    group: Any = None,
    of_first: Collection[str] = (),
    held_by: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Slice]:
    """What `rank` writes of the world's state (`shared`, which may hold DTensors) and of its `own`, in file order.

    `of_first` names the tensors in `shared` that rank 0 writes, unless they are sharded. `held_by` has, for each tensor
    of a union, the ranks that hold the same part as this one: the tensor itself does not show them.
    Sharded tensors come after replicated ones of the same width, so that the part that all ranks read is one range.
    """
    holders = held_by or {}
    teams: dict[tuple[int, ...], dict[str, _LocalPart]] = {}
    everyone = tuple(range(world_size))
    first: list[Slice] = []
    for name, tensor in shared.items():
        alike = holders.get(name, everyone)
        if not is_sharded(tensor):
            if name in of_first:
                if rank == alike[0]:
                    first.append(Slice(name, tuple(tensor.shape), whole(tensor.shape), tensor))
                continue
            teams.setdefault(alike, {})[name] = _LocalPart(tuple(tensor.shape), whole(tensor.shape), tensor)
            continue
        if not tensor.numel():  # no rank has a part of it, but it belongs to the state
            shape = tuple(tensor.shape)
            empty = tensor.to_local().new_empty(shape)  # type: ignore[attr-defined]
            teams.setdefault(alike, {})[name] = _LocalPart(shape, whole(shape), empty)
            continue
        local_part = holding(name, tensor, group)
        if local_part is not None:
            team = holders.get(name, local_part.replicas)
            teams.setdefault(team, {})[name] = _LocalPart(tuple(tensor.shape), local_part.box, local_part.local)
    ordered = [(False, s) for team, members in teams.items() if team == everyone for s in _team(members, team, rank)]
    ordered += [(False, s) for s in first]
    ordered += [(True, s) for team, members in teams.items() if team != everyone for s in _team(members, team, rank)]
    ordered += [(True, Slice(name, tuple(t.shape), whole(t.shape), t)) for name, t in own.items()]
    ordered.sort(key=lambda f: (-f[1].data.element_size(), f[0], f[1].name, f[1].box.offset))
    return [s for _, s in ordered]


def _team(members: Mapping[str, _LocalPart], team: tuple[int, ...], rank: int) -> list[Slice]:
    """This rank's share of the tensors that all ranks of a team have."""
    items = [Item(name, part.box.shape, part.local.element_size()) for name, part in members.items()]
    mine = []
    for portion in share(items, len(team))[team.index(rank)]:
        part = members[portion.name]
        box = moved(part.box, portion.box)
        if box.elements or box == whole(part.shape):  # ranks beyond a short axis hold nothing
            mine.append(Slice(portion.name, part.shape, box, part.local[portion.box.slices]))
    return mine


# --- shard


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of one shard. `spans` are the byte ranges of the tensors in the file."""

    header: bytes
    spans: dict[str, tuple[int, int]]
    size: int


def plan_shard(tensors: Mapping[str, torch.Tensor]) -> Plan:
    """Lay these tensors out in one file: the widest first, else in the given order."""
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
