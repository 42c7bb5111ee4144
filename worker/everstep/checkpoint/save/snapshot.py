"""The half of a save for which training waits: the state is taken apart, and this rank's part of it is copied.

Knows no store and no log. Invariant: nothing of the live state is needed once `copy` has returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.handle import SaveHandle
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.save.arrangement import Arrangement, Arranger
from everstep.checkpoint.save.buffers import Buffers
from everstep.checkpoint.save.parts import Staged
from everstep.checkpoint.state.alike import digests, digests_of_union
from everstep.checkpoint.state.capture import Captured
from everstep.checkpoint.state.finite import Nonfinite
from everstep.checkpoint.state.holders import Holders


@dataclass(frozen=True, slots=True)
class Taken:
    """A state that is taken apart and not yet copied. `told` and `held` are digests, where ranks compare them."""

    captured: Captured
    arranged: Arrangement
    tensors: Mapping[str, torch.Tensor]
    told: Mapping[str, int]
    held: Mapping[str, int]


class Snapshots:
    """Takes and copies the states of one Checkpointer. `holders` are those of one world."""

    def __init__(self, nonfinite: Nonfinite) -> None:
        self._nonfinite = nonfinite
        self._arranger = Arranger()
        self.buffers = Buffers()
        self.holders = Holders()

    def take(self, state: Mapping[str, Any], ranks: Ranks, problem: CheckpointError | None, *, compares: bool) -> Taken:
        """Take a state apart. Raises `problem`, and as `Holders.capture` does."""
        captured, teams = self.holders.capture(state, ranks, problem)
        arranged, tensors = self._arranger.arrange(captured, ranks, teams)
        told = digests(state, captured) if compares else {}
        held = digests_of_union(state, captured, teams) if compares else {}
        return Taken(captured, arranged, tensors, told, held)

    def copy(self, taken: Taken, ranks: Ranks, handle: SaveHandle, metrics: Mapping[str, float]) -> Staged:
        """Copy it to memory that no save in flight is written from, as the save of `handle`. Raises `SaveFailed` if
        there is none."""
        staging = self.buffers.take(taken.arranged.plan.size if taken.tensors else 0, handle)
        captured, arranged = taken.captured, taken.arranged
        return Staged(
            handle.step, handle.save_id, ranks.rank, ranks.world_size,
            staging.fill(arranged.plan, taken.tensors) if taken.tensors else None, arranged.entries,
            captured.own_values, {k: v for k, v in captured.values.items() if k not in captured.unions},
            arranged.checked, self._nonfinite, taken.told,
            {k: captured.values[k] for k in sorted(captured.unions)}, taken.held, metrics,
        )  # fmt: skip
