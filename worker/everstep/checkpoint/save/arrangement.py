"""Remembers the arrangement of this rank's shard from save to save: names, shapes and placements seldom change. For a
state of many tensors, computing them again would delay training longer than the copy does.

Knows nothing of files and of what tensors contain. Invariant: an arrangement is used again only for a state that equals
the one it was made for in everything that it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from everstep.checkpoint.format.manifest import Entry
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.save.portions import slices
from everstep.checkpoint.save.shard import Plan, entries_of, plan_shard
from everstep.checkpoint.state.capture import Captured
from everstep.checkpoint.state.finite import Checked
from everstep.checkpoint.state.holders import Teams
from everstep.checkpoint.state.sharding import local_of


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The file's layout, the manifest's entries, and which spans hold parameters."""

    plan: Plan
    entries: tuple[Entry, ...]
    checked: tuple[Checked, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """A part of what this rank holds of a tensor: its shape and strides, and its first element counted from there."""

    key: str
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


class Arranger:
    """Arranges states one after another."""

    def __init__(self) -> None:
        self._signature: object = None
        self._views: tuple[_View, ...] = ()
        self._arrangement: Arrangement | None = None

    def arrange(
        self, captured: Captured, ranks: Ranks, teams: Teams | None = None
    ) -> tuple[Arrangement, dict[str, torch.Tensor]]:
        """The arrangement and the views of the live tensors, by their keys in the file."""
        local = {
            name: local_of(t) for tensors in (captured.tensors, captured.own_tensors) for name, t in tensors.items()
        }
        signature = (
            ranks.rank, ranks.world_size, captured.parameters, captured.buffers, teams,
            [_shape(name, t, local[name]) for name, t in captured.tensors.items()],
            [_shape(name, t, local[name]) for name, t in captured.own_tensors.items()],
        )  # fmt: skip
        if self._arrangement is None or signature != self._signature:
            self._arrangement, self._views = _arrange(captured, ranks, local, teams)
            self._signature = signature
        return self._arrangement, {v.key: _look(local[v.name], v) for v in self._views}


def _arrange(
    captured: Captured, ranks: Ranks, local: dict[str, torch.Tensor], teams: Teams | None
) -> tuple[Arrangement, tuple[_View, ...]]:
    mine = slices(
        captured.tensors, captured.own_tensors, ranks.rank, ranks.world_size, ranks.group, captured.buffers, teams
    )
    plan = plan_shard({s.key: s.data for s in mine})
    checked = tuple(Checked(s.name, s.data.dtype, *plan.spans[s.key]) for s in mine if s.name in captured.parameters)
    views = tuple(
        _View(s.key, s.name, tuple(s.data.shape), s.data.stride(), _offset(s.data) - _offset(local[s.name]))
        for s in mine
    )
    return Arrangement(plan, entries_of(plan, mine), checked), views


def _shape(name: str, tensor: Any, local: torch.Tensor) -> tuple[object, ...]:
    """Everything about a tensor that its arrangement depends on."""
    placed = (tensor.device_mesh, tensor.placements, tensor.shape) if tensor is not local else None
    return (name, local.dtype, local.shape, local.stride(), placed)


def _look(local: torch.Tensor, view: _View) -> torch.Tensor:
    if view.first == 0 and view.shape == local.shape:
        return local
    return local.as_strided(view.shape, view.stride, _offset(local) + view.first)


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())
