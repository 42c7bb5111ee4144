"""The undo copy: a copy of all that a step changes, for scripts that run collectives after an optimizer step.

Such a step (a GAN's, PPO's, or one that sums its loss over the ranks at its end) can lose a peer after parameters have
changed. Then the copy, made when the step began, undoes the change. It costs memory and time. So it is made for no
other script, and only if it fits into a part of the free memory.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping

import torch

from everstep.checkpoint.save.snapshot import free_host_memory
from everstep.recovery.group.script_location import script_call_site
from everstep.recovery.rollback.snapshots import TensorSnapshot
from everstep.torch_private.tensors import copy_each, raw

log = logging.getLogger("everstep.train")

SHARE = 0.5  # of a device's free memory that the copy may take


class UndoCopy:
    """`wanted`: a collective was seen after an optimizer step. `on`: there is also room for the copy. `never`: why a
    copy can help nobody; then none is wanted."""

    def __init__(self, never: str = "") -> None:
        self._never = never
        self.wanted = self.on = False
        self.decided = False  # whether the room was checked in this world
        self._told: bool | None = None
        self.why_not = never or "no step of this process had shown before that collectives follow its optimizer's step"
        self._line = ""
        self._kept: list[torch.Tensor] = []

    def late(self, step: int, name: str) -> None:
        """A collective of step number `step` begins after an optimizer step, or after another change of parameters."""
        if self._never:
            return
        self.wanted = True
        asked = script_call_site(sys._getframe(2))
        self._line = f"step {step} runs a collective ({name}{asked.at if asked else ''}) behind an optimizer's step"

    def has_room(self, held: Iterable[TensorSnapshot]) -> bool:
        """Whether a copy of these has room now."""
        return self._full(_need(held)) is None

    def let_go(self) -> None:
        """The newest copy is not needed any more."""
        self._kept = []

    def _full(self, need: Mapping[torch.device, int]) -> torch.device | None:
        """A device without enough free memory; None if all have enough."""
        have = {device: _size(self._kept, device) for device in need}
        return next((d for d, size in need.items() if size > (free_memory(d) + have[d]) * SHARE), None)

    def decide(self, held: Iterable[TensorSnapshot], opaque: str = "") -> None:
        """Decide whether these are copied at the beginning of each step from now on. `opaque`: an object that cannot be
        copied."""
        need = _need(held)
        full = self._full(need)
        can = full is None and not opaque
        told, self.decided = self._told is can, True
        self.on = self._told = can
        line = "To do without, run it before optimizer.step(), or behind the block `with step:`"
        self.why_not = "" if full is None else f"a copy of {_words(need[full])} of tracked state has no room on {full}"
        if opaque:
            self.why_not = f"{opaque} cannot be copied: it holds more than tensors, arrays, numbers and texts"
        if told:
            return
        if can:
            log.info("%s: %s of tracked state are copied when a step begins, from which it is repeated if a peer is "
                     "lost. %s", self._line, _words(sum(need.values())), line)  # fmt: skip
            return
        self._kept = []
        log.warning("%s, and %s: if a peer is lost behind that step, all go back to the last commit. %s",
                    self._line, self.why_not, line)  # fmt: skip

    def keep(self, held: list[TensorSnapshot]) -> None:
        """Copy them."""
        tensors = _distinct(held)
        kept = self._kept
        for i, tensor in enumerate(tensors):
            if i < len(kept) and _alike(kept[i], tensor):
                continue
            kept[i : i + 1] = [torch.empty_like(tensor)]
        del kept[len(tensors) :]
        if tensors:
            with torch.no_grad():
                copy_each(kept, tensors)
        copies = {id(tensor): copy for tensor, copy in zip(tensors, kept, strict=True)}
        for h in held:
            h.copy, h.origin = copies[id(raw(h.tensor))], raw(h.tensor).detach()


def free_memory(device: torch.device) -> int:
    """Bytes that a process may still allocate on the device, as far as is known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return 0
    return free_host_memory()


def _need(held: Iterable[TensorSnapshot]) -> dict[torch.device, int]:
    """Bytes of a copy of these."""
    need: dict[torch.device, int] = {}
    for tensor in _distinct(held):
        need[tensor.device] = need.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    return need


def _distinct(held: Iterable[TensorSnapshot]) -> list[torch.Tensor]:
    return list({id(raw(h.tensor)): raw(h.tensor) for h in held}.values())


def _alike(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (kept.shape, kept.dtype, kept.device, kept.stride()) == (
        tensor.shape, tensor.dtype, tensor.device, tensor.stride(),
    )  # fmt: skip


def _size(tensors: list[torch.Tensor], device: torch.device) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t.device == device)


def _words(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
