"""What a step changes before its optimizers do, kept so that a failed step can be repeated from where it began.

Parameters and optimizer state need no copy: they change only in `optimizer.step()`, and a step whose optimizers have
all stepped is never repeated. Buffers (BatchNorm's), random generators, schedulers and gradient scalers are small.

Invariant: a step is repeated only if no optimizer has made it; one that some have made and others have not is torn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from everstep.train.randomness import generators_to_put_back
from everstep.train.recovery.agreement import Quality


class Replay:
    """The tracked objects of a run. `begin` at a step's start, `back` if it failed, with what it is worth then.

    `refuse` is called before each optimizer's step, and raises if the round is over by then.
    """

    def __init__(self, state: Mapping[str, Any], refuse: Callable[[], None]) -> None:
        self._modules = [t for t in state.values() if isinstance(t, torch.nn.Module)]
        self._optimizers = [t for t in state.values() if isinstance(t, torch.optim.Optimizer)]
        self._small = {k: t for k, t in state.items() if _is_small(t)}
        # A plateau's schedule moves by a figure that is not here.
        self._schedules = {k: t for k, t in self._small.items() if _is_schedule(t)}
        self._step = 0
        self._random = generators_to_put_back(state)
        self._stepped = set[int]()
        self._buffers: list[torch.Tensor] = []
        self._saved: dict[str, Any] = {}
        self._generators: list[dict[str, Any]] = []
        self._hooks = [o.register_step_pre_hook(lambda *_: refuse()) for o in self._optimizers]
        self._hooks += [o.register_step_post_hook(self._note(i)) for i, o in enumerate(self._optimizers)]

    def begin(self, step: int) -> None:
        """Step number `step` begins."""
        self._step = step
        self._stepped.clear()
        self._buffers = [b.detach().clone() for b in self._live_buffers()]
        self._saved = {key: copy.deepcopy(_content(t)) for key, t in self._small.items()}
        self._generators = [generator.state_dict() for generator in self._random]

    def back(self) -> Quality:
        """The step failed. If no optimizer has made it, all is as it was at its begin (WHOLE, to be repeated). If all
        have, it counts, without the lines after it (TAIL_LOST): schedules that move in each step, and had not, do. Else
        TORN."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        if not self._stepped:
            with torch.no_grad():
                for live, saved in zip(self._live_buffers(), self._buffers, strict=True):
                    live.copy_(saved)
            for key, saved in self._saved.items():
                _put_back(self._small[key], saved)
            for generator, drawn in zip(self._random, self._generators, strict=True):
                generator.load_state_dict(drawn)
            return Quality.WHOLE
        if len(self._stepped) < len(self._optimizers):
            return Quality.TORN
        for key, schedule in self._schedules.items():
            before = _moves(self._saved[key])
            # Told by what all ranks have, and not by what this process has seen: a new one judges as the others do.
            if 2 * before >= self._step and _moves(schedule.state_dict()) == before:
                schedule.step()
        return Quality.TAIL_LOST

    def end(self) -> None:
        """The run is over."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, number: int) -> Callable[..., None]:
        return lambda *_: self._stepped.add(number)

    def _live_buffers(self) -> Iterator[torch.Tensor]:
        for module in self._modules:
            yield from module.buffers()


def _is_small(target: Any) -> bool:
    return isinstance(target, dict | list | torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler)


def _is_schedule(target: Any) -> bool:
    schedules = torch.optim.lr_scheduler
    return isinstance(target, schedules.LRScheduler) and not isinstance(target, schedules.ReduceLROnPlateau)


def _moves(state: Mapping[str, Any]) -> int:
    """How often the schedule of this state has moved."""
    parts = state.get("_schedulers", ())  # of a chain, which has no count of its own
    return int(state["last_epoch"]) if "last_epoch" in state else max(map(_moves, parts), default=0)


def _content(target: Any) -> Any:
    return target if isinstance(target, dict | list) else target.state_dict()


def _put_back(target: Any, saved: Any) -> None:
    if isinstance(target, dict):
        target.clear()
        target.update(copy.deepcopy(saved))
    elif isinstance(target, list):
        target[:] = copy.deepcopy(saved)
    else:
        target.load_state_dict(saved)
        if isinstance(target, torch.amp.GradScaler) and target.is_enabled():
            # Else it holds that the optimizer's gradients, which are gone, were unscaled. Only `update` says otherwise.
            target._per_optimizer_states.clear()
