"""A copy of a state in memory: what `state.commit()` keeps and a lost peer brings back.

The state is taken apart as for a checkpoint, so all that a checkpoint can hold is copied, and nothing else. Invariant:
nothing that training changes shares memory with a snapshot.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from everstep.checkpoint.state.capture import apply, capture


class Snapshot:
    """The state as it is now."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        taken = capture(state, 0)
        self._values = copy.deepcopy(taken.values)
        self._tensors = {name: tensor.detach().clone() for name, tensor in taken.tensors.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put it back into the same objects."""
        # torch's optimizers keep the tensors that they are given.
        tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        apply(state, {"state": copy.deepcopy(self._values)}, tensors, 0)

    def shows(self, state: Mapping[str, Any]) -> bool:
        """Whether the state is still the one that was copied."""
        now = capture(state, 0)
        return (
            now.values == self._values
            and now.tensors.keys() == self._tensors.keys()
            and all(torch.equal(tensor, self._tensors[name]) for name, tensor in now.tensors.items())
        )
