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
class _Held:
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
    `of_first` names what of `shared` rank 0 writes, unless it is sharded. `held_by` has the ranks that hold the same as
    this one of a tensor, where that cannot be told from the tensor: of a union.

    Sharded tensors come after replicated ones of the same width: what all ranks want is one range of the file.
    """
    holders = held_by or {}
    teams: dict[tuple[int, ...], dict[str, _Held]] = {}
    everyone = tuple(range(world_size))
    first: list[Slice] = []
    for name, tensor in shared.items():
        alike = holders.get(name, everyone)
        if not is_sharded(tensor):
            if name in of_first:
                if rank == alike[0]:
                    first.append(Slice(name, tuple(tensor.shape), whole(tensor.shape), tensor))
                continue
            teams.setdefault(alike, {})[name] = _Held(tuple(tensor.shape), whole(tensor.shape), tensor)
            continue
        if not tensor.numel():  # nobody holds a part of it, and it is still one of the state's
            shape = tuple(tensor.shape)
            empty = tensor.to_local().new_empty(shape)  # type: ignore[attr-defined]
            teams.setdefault(alike, {})[name] = _Held(shape, whole(shape), empty)
            continue
        held = holding(name, tensor, group)
        if held is not None:
            teams.setdefault(holders.get(name, held.replicas), {})[name] = _Held(
                tuple(tensor.shape), held.box, held.local
            )
    found = [(False, s) for team, members in teams.items() if team == everyone for s in _team(members, team, rank)]
    found += [(False, s) for s in first]
    found += [(True, s) for team, members in teams.items() if team != everyone for s in _team(members, team, rank)]
    found += [(True, Slice(name, tuple(t.shape), whole(t.shape), t)) for name, t in own.items()]
    found.sort(key=lambda f: (-f[1].data.element_size(), f[0], f[1].name, f[1].box.offset))
    return [s for _, s in found]


def _team(members: Mapping[str, _Held], team: tuple[int, ...], rank: int) -> list[Slice]:
    """This rank's share of what a team of ranks holds alike."""
    items = [Item(name, held.box.shape, held.local.element_size()) for name, held in members.items()]
    found = []
    for portion in share(items, len(team))[team.index(rank)]:
        held = members[portion.name]
        box = moved(held.box, portion.box)
        if box.elements or box == whole(held.shape):  # ranks beyond a short axis hold nothing
            found.append(Slice(portion.name, held.shape, box, held.local[portion.box.slices]))
    return found


# --- shard


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
