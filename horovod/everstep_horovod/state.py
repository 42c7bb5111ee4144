"""`hvd.elastic.TorchState`: what an elastic script keeps over the loss of a peer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.state.capture import capture
from everstep.checkpoint.state.refilling import Taken, refilled
from everstep.recovery.ddp.reducers import BUCKETS
from everstep.recovery.errors import LoopError
from everstep.recovery.state.randomness import STATE
from everstep.recovery.state.switches import SWITCHES
from everstep_horovod.optimizer import Distributed, made_here
from everstep_horovod.sampler import ElasticSampler

log = logging.getLogger("everstep.train")

VALUES = "values"  # the name in a commit of what is no object with a state_dict
_RESERVED = (VALUES, "data", STATE, SWITCHES, BUCKETS)


class Commits(Protocol):
    """What `hvd.elastic.run` does for the state that it was given."""

    def commit(self) -> None: ...
    def save(self) -> None: ...
    def restore(self) -> None: ...
    def check_host_updates(self) -> None: ...


class TorchState:
    """Modules, optimizers, samplers, schedules, and values: numbers, texts, lists, dictionaries and tensors. Each is an
    attribute of this object. Raises `LoopError` for a value that no commit can hold."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {name: value for name, value in {"model": model, "optimizer": optimizer}.items() if value is not None}
        given |= kwargs
        set_ = object.__setattr__
        set_(self, "_objects", {name: value for name, value in given.items() if _has_state(value)})
        set_(self, "_values", [name for name in given if name not in self._objects])
        set_(self, "_callbacks", list[Callable[[], None]]())
        set_(self, "_commits", None)
        set_(self, "_finished", False)
        for name, value in given.items():
            set_(self, name, value)
        for name, value in self._objects.items():
            if name in _RESERVED:
                raise LoopError(f"TorchState({name}=…): the name is reserved; use another")
            if isinstance(value, DistributedDataParallel):
                raise LoopError(
                    f"TorchState({name}=…): a DistributedDataParallel averages over the world in which it was made. "
                    "Pass the module inside it, and let hvd.DistributedOptimizer average the gradients"
                )
        set_(self, "_tracked", {**self._objects, VALUES: self._plain()} if given else {})
        try:
            capture({VALUES: self._plain()}, 0)
        except StateMismatch as e:
            raise LoopError(
                f"TorchState({', '.join(self._values)}): {e}. Pass numbers, texts, lists, dictionaries, tensors, or "
                "objects with state_dict() and load_state_dict()"
            ) from e

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    _objects: dict[str, Any]
    _values: list[str]
    _callbacks: list[Callable[[], None]]
    _commits: Commits | None
    _finished: bool
    _tracked: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._objects:
            if not _has_state(value):
                raise LoopError(f"state.{name} = …: a {type(value).__name__} has no state_dict() and load_state_dict()")
            self._objects[name] = self._tracked[name] = value
        elif name not in self._values and not hasattr(self, name):
            log.warning("state.%s is in no commit: pass %s= to TorchState(…)", name, name)
        object.__setattr__(self, name, value)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call when the world has changed, before the ranks agree on one state; and when the state was
        loaded from storage, because the world before may have been another."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the registered functions."""
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Keep a copy of the state in memory, to which all ranks go back if a peer is lost. All ranks call it after the
        same batches. Saves to storage when a save is due. May raise `HostsUpdatedInterrupt`, and `Preempted` (exit code
        86) if the job is asked to stop."""
        if self._commits is not None:
            self._commits.commit()

    def save(self) -> None:
        """As `commit`, without a look at the other ranks."""
        if self._commits is not None:
            self._commits.save()

    def restore(self) -> None:
        """Go back to the last commit, on this rank."""
        if self._commits is not None:
            self._commits.restore()

    def check_host_updates(self) -> None:
        """Raises `HostsUpdatedInterrupt` on all ranks if the world is about to change; the state then is a commit."""
        if self._commits is not None:
            self._commits.check_host_updates()

    def sync(self) -> None:
        """Refused: `hvd.elastic.run` does it when it calls its function."""
        raise LoopError("state.sync(): leave it out, because hvd.elastic.run brings all ranks to one state")

    def _plain(self) -> _Values:
        return _Values(self)

    def _check(self) -> None:
        """Raises `LoopError` for an optimizer that would not go back to a commit, or parameters that it changes."""
        own = {id(value) for value in self._objects.values()}
        modules = [value for value in self._objects.values() if isinstance(value, torch.nn.Module)]
        known = {id(p) for module in modules for p in module.parameters()}
        for optimizer in made_here():
            if id(optimizer) not in own:
                raise LoopError(
                    f"the {type(optimizer).__name__} of hvd.DistributedOptimizer is not in the state: pass it to "
                    "TorchState(model, optimizer, …), else its own state would not go back to the last commit"
                )
            if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
                raise LoopError(
                    f"the {type(optimizer).__name__} changes parameters of a module that is not in the state: pass all "
                    "modules to TorchState(…, other=other)"
                )

    def _samplers(self) -> list[ElasticSampler]:
        return [value for value in self._objects.values() if isinstance(value, ElasticSampler)]

    def _pending(self) -> str:
        """The name of an optimizer with gradients that no step has used; empty if there is none."""
        return next((n for n, value in self._objects.items() if isinstance(value, Distributed) and value.pending), "")

    def _averaged(self) -> int:
        """How often gradients were averaged: the same number on all ranks."""
        return sum(value.averaged for value in self._objects.values() if isinstance(value, Distributed))

    def _forget_gradients(self) -> None:
        """Gradients are of a step that is over, or that is repeated."""
        for value in self._objects.values():
            if isinstance(value, torch.nn.Module):
                parameters = list(value.parameters())
            elif isinstance(value, torch.optim.Optimizer):
                parameters = [p for group in value.param_groups for p in group["params"]]
            else:
                continue
            for parameter in parameters:
                parameter.grad = None


class _Values:
    """The plain values of a state, and whether its function has ended."""

    def __init__(self, state: TorchState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        values = {name: getattr(self._state, name) for name in self._state._values}
        return {VALUES: values, "finished": self._state._finished}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        taken = Taken()
        for name in self._state._values:
            # A commit has a Counter or a defaultdict as a plain dictionary.
            value = refilled(getattr(self._state, name), state[VALUES][name], taken)
            object.__setattr__(self._state, name, value)
        object.__setattr__(self._state, "_finished", bool(state["finished"]))


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
