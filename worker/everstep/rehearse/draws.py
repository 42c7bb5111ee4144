"""In a training process of a rehearsal: notes from which generators of random numbers a step without a loader draws,
with what states it leaves them, and the losses that it differentiates.

Ranks that draw the same numbers may each take a part of them: then their losses differ.
"""

from __future__ import annotations

from typing import Any

import torch

from everstep.recovery.state.randomness import STATE, Source, global_sources
from everstep.train import session
from everstep.train.guards import left_state
from everstep.train.step import Step

_NAMES = {"python": "random", "numpy": "numpy.random", "cuda": "torch.cuda"}  # of the global generators


class Draws:
    """Of one process. `drawn`: a digest of the state in which the last step has left each generator that it has drawn
    from, by name. `losses`: digests."""

    def __init__(self) -> None:
        self.drawn: dict[str, str] = {}
        self.losses: list[str] = []
        self._sources: dict[str, Source] = {}
        self._before: dict[str, int] = {}  # while such a step runs

    def begin(self, step: Step, run: session.Run | None, world_size: int) -> None:
        """The step has been entered. Where the ranks of the world compute one replica together, they have to draw the
        same numbers."""
        self.drawn, self.losses, self._before = {}, [], {}
        if run is None or step._batches is not None or run._shape.readers >= world_size:
            return
        self._begin(run._state[STATE].sources())

    def begin_own(self) -> None:
        """A step of a loop of the script's own has been noted: what is drawn now is for the next one."""
        self.drawn, self.losses = {}, []
        self._begin(global_sources(torch.device("cpu")))

    def _begin(self, sources: dict[str, Source]) -> None:
        self._sources = self._sources or sources
        self._before = {name: source.fingerprint() for name, source in self._sources.items()}

    def differentiate(self, losses: Any) -> None:
        """The script computes gradients of one or several tensors."""
        if self._before:
            tensors = [losses] if isinstance(losses, torch.Tensor) else list(losses)
            self.losses += [left_state.digest(one.detach()) for one in tensors if isinstance(one, torch.Tensor)]

    def end(self, *, by_loader: bool = False) -> None:
        """The step's block has ended. `by_loader`: a loader has chosen its samples."""
        if by_loader:
            self._before = {}
        after = {name: self._sources[name].fingerprint() for name in self._before}
        self.drawn = {_NAMES.get(name, name): str(now) for name, now in after.items() if now != self._before[name]}
        self._before = {}
