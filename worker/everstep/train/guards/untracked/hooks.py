"""Refuses a hook that the script registers in its loop, on a tracked module, parameter or optimizer, and leaves there:
a process that comes later, or goes on from a commit, does not have it.

Invariant: a step in which nobody registers a hook costs one comparison; torch numbers all hooks of a process in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from everstep.checkpoint.state.modules import bare
from everstep.recovery.errors import LoopError
from everstep.torch_private import modules, optimizers, tensors
from everstep.train.guards.script_objects import code_behind, is_script


class Hooks:
    """The hooks on objects in `state`. Make it when the loop begins. `is_free`: whether an object with this name may be
    lost."""

    def __init__(self, state: Mapping[str, Any], is_free: Callable[[str], bool]) -> None:
        self._state = state
        self._is_free = is_free
        self._first = self._next = RemovableHandle.next_id
        self._looks = 0

    def check(self) -> None:
        """Check after a complete step. Of the steps in which hooks were registered, the 1st, 2nd, 4th, 8th, … are
        checked. Raises `LoopError`."""
        if self._next == RemovableHandle.next_id:
            return
        self._next = RemovableHandle.next_id
        self._looks += 1
        if self._looks & (self._looks - 1):
            return
        for name, hook in self._new():
            code = code_behind(hook)
            if code is None or not is_script(code.co_filename) or self._is_free(name):
                continue
            called, file = getattr(hook, "__qualname__", type(hook).__qualname__), Path(code.co_filename).name
            raise LoopError(
                f"the hook {called} ({file}:{code.co_firstlineno}) was registered on {name} in the loop: a process "
                "that replaces a lost one, or goes on from a commit, does not have it. Register it before run.steps(), "
                "and let it decide by run.step when to act; or remove it before the step ends; or, if it "
                f"changes nothing, run.untracked({name!r})"
            )

    def _new(self) -> Iterator[tuple[str, Any]]:
        for key, target in self._state.items():
            if isinstance(target, torch.optim.Optimizer):
                yield from ((key, hook) for hook in self._later(optimizers.hooks_of(target)))
            if not isinstance(target, torch.nn.Module):
                continue
            for path, module in bare(target).named_modules():
                name = f"{key}.{path}" if path else key
                yield from ((name, hook) for hook in self._later(modules.hooks_of(module)))
                for own, p in modules.parameters_of(module).items():
                    if p is not None:
                        yield from ((f"{name}.{own}", hook) for hook in self._later(tensors.hooks_of(p)))

    def _later(self, tables: Iterable[Mapping[int, Any]]) -> Iterator[Any]:
        yield from (hook for table in tables for number, hook in table.items() if number >= self._first)
