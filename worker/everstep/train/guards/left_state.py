"""The tracked state as it was when the script left its loop early, by `break` or `return`.

The run is saved when it is closed, which may be at the script's end: after an evaluation, after the best weights were
loaded for a test. That state belongs to no step. So what has changed since is refused by name. Which modules train, and
which parameters require gradients, is saved as it was (`Switches.keep`): an evaluation calls `model.eval()`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep.train.guards.contents import digest_of

log = logging.getLogger("everstep.train")


class LeftState:
    """Of one process. `state`: what is tracked by name. A warning names what cannot be read and is not compared."""

    def __init__(self, state: Mapping[str, Any], step: int) -> None:
        self._state, self._step = dict(state), step
        self._digests = self._read()

    def _read(self) -> dict[str, str]:
        digests = dict.fromkeys(self._state, "")
        for name, value in self._state.items():
            try:
                digests[name] = digest(value)
            except Exception as e:  # an object's own `state_dict` may raise anything
                log.warning("whether %s changes between the loop and the close of the run is not seen: it cannot be "
                            "read (%s: %s)", name, type(e).__name__, e)  # fmt: skip
        return digests

    def check(self) -> None:
        """Raises `LoopError` if anything has changed since."""
        now_digests = self._read()
        changed = [name for name in self._state if now_digests[name] != self._digests[name]]
        if changed:
            raise LoopError(
                f"{', '.join(changed)} changed after the loop was left behind step {self._step} and before the run was "
                "closed: that is the state of no step, and it is not saved. Write `run.close()` right behind the loop, "
                "before best weights are loaded or anything else that is tracked is changed"
            )


def digest(value: Any) -> str:
    """Of all bits of an object's state: a module's parameters and buffers, else its `state_dict`, else itself."""
    if isinstance(value, torch.nn.Module):
        tensors = itertools.chain(value.named_parameters(), value.named_buffers())
        value = {name.removeprefix("module."): tensor for name, tensor in tensors}
    return digest_of(value.state_dict() if hasattr(value, "state_dict") else value)
