"""Which ranks hold which tensors of a union, so that each name is written once, an even part by each of its holders.

A rank cannot know this from its own tensors, as it can in a replicated state. So the ranks exchange descriptions: in
the first save, and whenever names, shapes or placements have changed on one of them. Invariants: the ranks agree first
whether there are unions, so that no rank waits in an exchange that another one does not make; what is refused is
refused on every rank, before anything is written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.errors import CheckpointError, Fenced, FormatError, StateMismatch
from everstep.checkpoint.format.boxes import Box, check_tiling, whole
from everstep.checkpoint.format.manifest import DTYPE_BYTES, Piece
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.state.capture import Captured, capture
from everstep.checkpoint.state.sharding import cut_uncertainly, elsewhere, holding, is_sharded, local_of
from everstep.checkpoint.state.tree import DTYPES
from everstep.checkpoint.state.union import Union

Teams = Mapping[str, tuple[int, ...]]  # by name: the ranks, in order, that hold the same part of the tensor as this one

_SAME, _CHANGED, _BROKEN, _FENCED = 0, 1, 2, 3


def any_union(state: Any, ranks: Ranks) -> bool:
    """Whether any rank's state has something that is marked with `Union`. Collective."""
    here = isinstance(state, Mapping) and any(isinstance(target, Union) for target in state.values())
    return bool(ranks.maximum(int(here)))


@dataclass(frozen=True, slots=True)
class _RankPart:
    """One rank's part of a tensor: `box` of `shape`."""

    rank: int
    dtype: str
    shape: tuple[int, ...]
    box: Box


class Holders:
    """The holders in one world. They are exchanged once, and remembered from save to save."""

    def __init__(self) -> None:
        self.unions: bool | None = None  # whether any rank's state has a union; None: not agreed yet
        self._signature: object = None
        self._teams: Teams = {}
        self._cuts = set[object]()  # shapes and placements that passed `check_cuts`

    def agree_on_unions(self, state: Any, ranks: Ranks) -> bool:
        """Agree with the other ranks whether any rank's state has a union. Collective."""
        self.unions = any_union(state, ranks)
        return self.unions

    def capture(
        self, state: Mapping[str, Any], ranks: Ranks, problem: CheckpointError | None
    ) -> tuple[Captured, Teams]:
        """The state taken apart, and the holders of its unions. `problem`: why this rank saves nothing.

        With unions it is collective, and if it raises on one rank it raises on all of them: else the other ranks would
        wait for that rank in their next save. Raises `problem`, and what `teams` raises."""
        if not self.unions:
            if problem is not None:
                raise problem
            captured = capture(state, ranks.rank)
            if captured.unions:
                raise StateMismatch(
                    f"{', '.join(sorted(captured.unions))}: marked with everstep.Union now, and was not when the ranks "
                    "agreed on what they save, at restore() or the first save. Mark it from the beginning"
                )
            self.check_cuts(captured, ranks)
            return captured, {}
        own: Captured | None = None
        try:
            own = capture(state, ranks.rank) if problem is None else None
        except CheckpointError as e:
            problem = e
        try:
            teams = self.teams(own, ranks, fenced=isinstance(problem, Fenced))
        except CheckpointError as e:
            raise problem or e from None
        assert own is not None
        self.check_cuts(own, ranks)
        return own, teams

    def check_cuts(self, captured: Captured, ranks: Ranks) -> None:
        """Raises `StateMismatch` on every rank if one holds another part of a tensor than its placements say. It is
        collective where that is uncertain for some shape and placements, and only the first time for these."""
        odd = [n for n, t in captured.tensors.items() if n not in captured.united and cut_uncertainly(t)]
        tensors: Any = captured.tensors
        cuts = {(tensors[n].device_mesh, tensors[n].placements, tuple(tensors[n].shape)) for n in odd}
        if cuts <= self._cuts:
            return
        problem: StateMismatch | None = None
        try:
            for name in odd:
                holding(name, tensors[name], ranks.group)
        except StateMismatch as e:
            problem = e
        if ranks.maximum(int(problem is not None)):
            raise problem or StateMismatch(elsewhere(odd))
        self._cuts |= cuts

    def teams(self, captured: Captured | None, ranks: Ranks, *, fenced: bool = False) -> Teams:
        """The holders of each tensor of this rank's unions. Collective; a rank whose state cannot be saved passes None.

        Raises `StateMismatch`, on every rank, if ranks hold one name with other shapes or types, or only parts of it;
        `CheckpointError` if another rank passed None; `Fenced` if it did because it is `fenced`.
        """
        signature = None if captured is None else _signature(captured)
        here = _CHANGED if signature is None or signature != self._signature else _SAME
        described: dict[str, Any] = {}
        problem: CheckpointError | None = None
        if captured is None:
            here = _FENCED if fenced else _BROKEN
        elif here == _CHANGED:
            try:
                described = _all_described(captured, ranks)
            except StateMismatch as e:
                here, problem = _BROKEN, e
        worst = ranks.maximum(here)
        if worst >= _BROKEN or captured is None:
            self._signature = None
            if worst == _FENCED:  # this error ends each process, with its exit code
                raise Fenced("another rank was fenced by a newer writer, which owns the log now: no rank saves")
            raise problem or CheckpointError(
                "the state of another rank cannot be saved, and that rank says why: no rank saves it"
            )
        if worst == _CHANGED:
            self._signature = None
            described = described or _all_described(captured, ranks)
            replies = ranks.from_each(zlib.compress(json.dumps(described).encode(), 1))
            self._teams = agreed([json.loads(zlib.decompress(data)) for data in replies], ranks.rank)
            self._signature = signature
        return self._teams


def agreed(by_rank: Iterable[Mapping[str, Any]], rank: int) -> Teams:
    """The teams of `rank`. `by_rank`: each rank's description of its tensors: name → type, shape, and its box (offset
    and shape)."""
    parts: dict[str, list[_RankPart]] = {}
    for number, described in enumerate(by_rank):
        for name, (dtype, shape, box) in described.items():
            part = None if box is None else Box(tuple(box[0]), tuple(box[1]))
            if part is not None:
                parts.setdefault(name, []).append(_RankPart(number, dtype, tuple(shape), part))
    teams: dict[str, tuple[int, ...]] = {}
    for name in sorted(parts):
        _check(name, parts[name])
        mine = [p.box for p in parts[name] if p.rank == rank]
        if mine:
            teams[name] = tuple(p.rank for p in parts[name] if p.box == mine[0])
    return teams


def _check(name: str, parts: list[_RankPart]) -> None:
    """Raise `StateMismatch` unless the ranks' parts make up one whole tensor."""
    first = parts[0]
    for other in parts:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise StateMismatch(
                f"{name}: rank {first.rank} holds {first.dtype} {first.shape}, rank {other.rank} {other.dtype} "
                f"{other.shape}, under one name. A name is one tensor in a union: name it as the whole model does, "
                "with the number of its layer or expert in the whole"
            )
    boxes = {p.box for p in parts if p.box.elements or p.box == whole(p.shape)}
    pieces = tuple(
        Piece(0, name, b.offset, b.shape, 0, b.elements * DTYPE_BYTES[first.dtype])
        for b in sorted(boxes, key=lambda b: b.offset)
    )
    try:
        check_tiling(first.shape, pieces, name)
    except FormatError as e:
        ranks = ", ".join(str(p.rank) for p in parts[:8])
        raise StateMismatch(
            f"{e}, and no other rank than {ranks} holds one. In a union ranks hold either equal parts of a tensor or "
            "parts that do not overlap, and together all of it"
        ) from e


def _all_described(captured: Captured, ranks: Ranks) -> dict[str, Any]:
    return {name: _described(name, captured.tensors[name], ranks) for name in sorted(captured.united)}


def _described(name: str, tensor: Any, ranks: Ranks) -> tuple[str, tuple[int, ...], Any]:
    shape = tuple(tensor.shape)
    box: Box | None = whole(shape)
    if is_sharded(tensor) and tensor.numel():
        here = holding(name, tensor, ranks.group)
        box = None if here is None else here.box
    return DTYPES[tensor.dtype], shape, None if box is None else (box.offset, box.shape)


def _signature(captured: Captured) -> object:
    """Everything that `_described` depends on."""
    signature = []
    for name in sorted(captured.united):
        tensor: Any = captured.tensors[name]
        placed = (tensor.device_mesh, tensor.placements, local_of(tensor).shape) if is_sharded(tensor) else None
        signature.append((name, tensor.dtype, tuple(tensor.shape), placed))
    return signature
