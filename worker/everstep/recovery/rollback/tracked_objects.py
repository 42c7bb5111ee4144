"""The kinds of tracked objects: which parts of each are copied when a step begins or watched, and how to restore them.

Parameters and optimizer state are large, so they are only watched: by torch's counts of changes, by identity and by
address. Small objects are copied. Buffers are copied too, because torch does not count BatchNorm's changes.

Invariant: after `begin`, unless `moved` names something, `put_back` brings the object to where it was at `begin`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from everstep.checkpoint.state import layouts, schedules
from everstep.checkpoint.state.divided import stepped
from everstep.recovery import digests
from everstep.recovery.ddp.reducers import BUCKETS
from everstep.recovery.rollback import snapshots
from everstep.recovery.rollback.snapshots import TensorSnapshot, address
from everstep.recovery.state.optimizers import state_owners
from everstep.recovery.state.randomness import STATE
from everstep.recovery.state.scalers import scalers
from everstep.recovery.state.switches import SWITCHES
from everstep.torch_private.modules import buffers_of, parameters_of
from everstep.torch_private.optimizers import is_of_one_step, steps_of
from everstep.torch_private.sharded import shards_of
from everstep.torch_private.tensors import copy_each, raw, sum_of_versions, version

ELSEWHERE = ("data", "rng", STATE, SWITCHES, BUCKETS)  # the session's own entries, which it restores itself
LARGE = 2**20  # bytes of a buffer that is copied again only if torch has counted a change


class TrackedObject:
    """One tracked object, or a part of one. `name` is the script's."""

    opaque = ""  # after `large`: the part that cannot be copied

    def __init__(self, name: str) -> None:
        self.name = name

    def look(self) -> None:
        """Find the object's parts anew. Called in watched steps."""

    def begin(self) -> None:
        """A step begins."""

    def large(self) -> list[TensorSnapshot]:
        """After `begin`, the object's tensors without copies. If the caller adds copies, `put_back` restores them."""
        return []

    def moved(self) -> str | None:
        """The name of a tensor that has changed since `begin` and has no copy; None if there is none."""
        return None

    def put_back(self) -> None:
        """Restore everything that was copied to its state at `begin`."""

    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The object's tensors without copies, by name."""
        yield from ()


class Module(TrackedObject):
    """Parameters are watched and buffers copied. Both are put back in their places if forward has replaced them.
    `training` and `requires_grad` are restored too, because a failed step may leave them changed."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name)
        self._module = module
        self._replaces = False  # whether its parameters get other storages from step to step
        self._addresses: dict[int, int] = {}  # of parameters, at the last `look`
        self._parameters: list[torch.Tensor] = []
        self._dictionaries: list[tuple[dict[str, Any], dict[str, Any]]] = []  # a module's dictionary, and its items
        self._version = 0
        self._buffers: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []
        self._large: dict[int, tuple[int, int]] = {}
        self._uncounted = set[int]()  # large buffers that change without torch's counting it, by `.data` or numpy
        self._old = set[int]()  # large buffers whose copy is older than the step's beginning
        self._training: list[bool] = []
        self._required: list[bool] = []
        self._captured: list[TensorSnapshot] = []
        self._extra: list[tuple[torch.nn.Module, Any]] = []
        self.look()

    def look(self) -> None:
        modules = self._modules = list(self._module.modules())
        self._shards = [p.sharded_param for m in modules for p in shards_of(m)]
        # Parameters of modules that FSDP2 shards are left out, because forward replaces them.
        parameters: list[dict[str, Any]] = [] if self._shards else [parameters_of(m) for m in modules]
        buffers: list[dict[str, Any]] = [buffers_of(m) for m in modules]
        self._of_parameters, self._of_buffers = [own for own in parameters if own], [own for own in buffers if own]
        plain = torch.nn.Module.get_extra_state
        self._with_extra = [m for m in modules if type(m).get_extra_state is not plain]
        addresses = {id(p): address(p) for p in self._present()}
        if any(addresses.get(key, now) != now for key, now in self._addresses.items()):
            self._replaces = True
        self._addresses = addresses
        for i, marks in self._large.items():
            buffer = self._buffers[i]
            if marks == (version(buffer), address(buffer)) and not snapshots.equal(buffer, self._saved[i]):
                self._uncounted.add(i)

    def begin(self) -> None:
        self._dictionaries = [(d, d.copy()) for d in (*self._of_parameters, *self._of_buffers)]
        self._parameters = self._present()
        self._version = sum_of_versions(self._parameters)
        self._training, self._required = self._switches()
        # An evaluation between two steps may have moved all parameters (`module.to`).
        ends = self._parameters[:: max(1, len(self._parameters) - 1)]
        if self._replaces or any(self._addresses.get(id(p)) != address(p) for p in ends):
            self._addresses = {id(p): address(p) for p in self._parameters}
        self._captured = []
        self._extra = [(m, copy.deepcopy(m.get_extra_state())) for m in self._with_extra]
        self._save()

    def large(self) -> list[TensorSnapshot]:
        self._captured = [TensorSnapshot(p, version(p), address(p)) for p in self._parameters if not is_lazy(p)]
        return self._captured

    def moved(self) -> str | None:
        if self._captured and all(h.copy is not None for h in self._captured):
            return None
        known = self._addresses
        if sum_of_versions(self._parameters) == self._version and all(
            known.get(id(p)) == address(p) for p in self._parameters
        ):
            return None
        return self.name

    def put_back(self) -> None:
        for live, items in self._dictionaries:
            if len(live) != len(items) or any(live.get(k) is not v for k, v in items.items()):
                live.clear()
                live.update(items)
        for module, training in zip(self._modules, self._training, strict=True):
            if module.training is not training:
                module.training = training
        for parameter, required in zip(self._switchable(), self._required, strict=True):
            if parameter.requires_grad is not required:
                parameter.requires_grad_(required)
        with torch.no_grad():
            for i, (buffer, saved) in enumerate(zip(self._buffers, self._saved, strict=True)):
                if i not in self._old or self._large[i] != (version(buffer), address(buffer)):
                    snapshots.write(buffer, saved)
        for captured in self._captured:
            captured.back()
        for module, extra in self._extra:
            module.set_extra_state(copy.deepcopy(extra))

    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._shards:
            yield from ((f"{self.name}, shard {i}", p) for i, p in enumerate(self._shards))
        else:
            yield from ((f"{self.name}.{name}", p) for name, p in self._module.named_parameters())

    def _present(self) -> list[torch.Tensor]:
        if self._shards:
            return [raw(p) for p in self._shards]
        return [p for d in self._of_parameters for p in d.values() if p is not None]

    def _switchable(self) -> list[torch.Tensor]:
        return [] if self._shards else self._parameters

    def _switches(self) -> tuple[list[bool], list[bool]]:
        return [m.training for m in self._modules], [p.requires_grad for p in self._switchable()]

    def _save(self) -> None:
        live = [b for d in self._of_buffers for b in d.values() if b is not None]
        self._old = set()
        if len(live) != len(self._buffers) or any(a is not b for a, b in zip(live, self._buffers, strict=True)):
            self._buffers, self._saved, self._uncounted = live, [b.detach().clone() for b in live], set()
            self._large = {i: (version(b), address(b)) for i, b in enumerate(live) if _is_large(b)}
            return
        to: list[torch.Tensor] = []
        source: list[torch.Tensor] = []
        for i, (buffer, saved) in enumerate(zip(live, self._saved, strict=True)):
            if not layouts.is_dense(buffer) or buffer.shape != saved.shape or buffer.dtype != saved.dtype:
                self._saved[i] = buffer.detach().clone()
                continue
            if _is_large(buffer):
                now = (version(buffer), address(buffer))
                if self._large.get(i) == now and i not in self._uncounted:
                    self._old.add(i)
                    continue
                self._large[i] = now
            to.append(saved)
            source.append(buffer)
        if to:
            with torch.no_grad():
                copy_each(to, source)


class Optimizer(TrackedObject):
    """An optimizer's state, which is watched. `Rollback` notes whether its step has begun."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, tracked: Collection[int] = ()) -> None:
        super().__init__(name)
        self._optimizer = optimizer
        self._tracked = tracked
        self._loaded = self._looked = 0
        self.hooks = [optimizer.register_load_state_dict_post_hook(self._load)]
        self._replaces = False  # whether it has other tensors from step to step
        self._known: dict[tuple[Any, Any], torch.Tensor] = {}
        # Its dictionaries, the items of each, and all its keys; None: new keys do not matter.
        self._kept: list[tuple[dict[Any, Any], dict[Any, Any], set[Any] | None]] = []
        self._captured: list[TensorSnapshot] = []
        self.look()

    def _load(self, _: Any) -> None:
        self._loaded += 1

    def look(self) -> None:
        known, self._known = self._known, self._present()
        if self._looked == self._loaded:  # otherwise a load has replaced its tensors
            self._replaces |= any(self._known.get(key, tensor) is not tensor for key, tensor in known.items())
        self._looked = self._loaded
        self._tensors = [raw(v) for v in self._known.values()]

    def _present(self) -> dict[tuple[Any, Any], torch.Tensor]:
        states = [(id(p), s) for p, s in list(self._optimizer.state.items()) if isinstance(s, dict)]
        return {(p, key): v for p, s in states for key, v in s.items() if isinstance(v, torch.Tensor)}

    def begin(self) -> None:
        if self._replaces:
            self._known = self._present()
            self._tensors = [raw(v) for v in self._known.values()]
        self._before = self._mark()
        self._kept, self._captured = [], []

    def large(self) -> list[TensorSnapshot]:
        self._kept, self._captured, self.opaque = [], [], ""
        for owner in state_owners(self._optimizer, self._tracked):
            items = {key: value for key, value in owner.live.items() if owner.keys is None or key in owner.keys}
            unknown = (key for key, value in items.items() if owner.keys and not snapshots.is_known(value))
            if opaque := next(unknown, ""):
                self.opaque = f"{self.name}.{opaque}"
                continue
            kept, captured = snapshots.hold(items, copies=False)
            self._kept.append((owner.live, kept, set(owner.live) if owner.whole else None))
            self._captured += captured
        return self._captured

    def moved(self) -> str | None:
        if self._kept and not self.opaque and all(h.copy is not None for h in self._captured):
            return None
        known = self._present()
        same = all(known.get(key) is tensor for key, tensor in self._known.items()) and self._mark() == self._before
        return None if same else f"the state of {self.name}"

    def put_back(self) -> None:
        if self.opaque or any(h.copy is None for h in self._captured):
            return
        for live, kept, there in self._kept:
            for key in [key for key in live if there is not None and key not in there]:
                del live[key]
            for key, value in kept.items():
                live[key] = snapshots.restored(value)

    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, state in enumerate(list(self._optimizer.state.values())):
            if isinstance(state, dict):
                yield from (
                    (f"{self.name}, {key} of parameter {i}", v)
                    for key, v in state.items()
                    if isinstance(v, torch.Tensor)
                )

    def _mark(self) -> tuple[int, int]:
        return self._loaded, sum_of_versions(self._tensors)


class Tree(TrackedObject):
    """Nested values, which `get` returns. `put` restores earlier ones."""

    def __init__(self, name: str, get: Callable[[], Any], put: Callable[[Any], None] | None = None) -> None:
        super().__init__(name)
        self._get, self._put = get, put
        self._kept: Any = None
        self._captured: list[TensorSnapshot] = []

    def begin(self) -> None:
        self._kept, self._captured = snapshots.hold(self._get())

    def large(self) -> list[TensorSnapshot]:
        return [h for h in self._captured if h.copy is None]

    def moved(self) -> str | None:
        return self.name if any(h.moved for h in self._captured) else None

    def put_back(self) -> None:
        live = self._get()
        if snapshots.same(self._kept, live):
            return
        if self._put is not None:
            self._put(snapshots.plain(self._kept))
        else:
            snapshots.restore(live, self._kept)

    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        if any(h.copy is None for h in self._captured):
            yield from snapshots.tensors(self._get(), self.name)


class Hyperparameters(Tree):
    """An optimizer's `param_groups` without the parameters' values."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._groups: list[tuple[dict[str, Any], list[Any], list[Any]]] = []
        super().__init__(f"{name}.param_groups", self._read)

    def _read(self) -> Any:
        return [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def begin(self) -> None:
        super().begin()
        self._groups = [(g, g["params"], list(g["params"])) for g in self.optimizer.param_groups]

    def put_back(self) -> None:
        for (group, same, parameters), kept in zip(self._groups, self._kept, strict=True):
            group.pop("params", None)
            snapshots.restore(group, kept)
            same[:] = parameters  # in place, because LBFGS keeps a reference to the list
            group["params"] = same
        self.optimizer.param_groups[:] = [group for group, _, _ in self._groups]


class Schedule(Tree):
    """A schedule, of the learning rate for example."""

    def __init__(self, name: str, schedule: Any) -> None:
        super().__init__(name, lambda: schedules.state_of(schedule), lambda kept: schedules.load(schedule, kept))


class Scaler(Tree):
    """A gradient scaler. Its `state_dict` would wait for the device."""

    def __init__(self, name: str, scaler: Any) -> None:
        super().__init__(name, self._read, self._write)
        self._scaler = scaler

    def _read(self) -> Any:
        attributes = vars(self._scaler).items()
        # Objects that are not values, such as the process group of torch's ShardedGradScaler, do not change in a step.
        return {k: v for k, v in attributes if not is_of_one_step(k) and snapshots.is_known(v)}

    def _write(self, kept: Any) -> None:
        for key, value in kept.items():
            setattr(self._scaler, key, value)

    def put_back(self) -> None:
        super().put_back()
        # Otherwise the scaler would treat the optimizer's new gradients as unscaled already, until its next `update`.
        steps_of(self._scaler).clear()


def tracked_objects(state: Mapping[str, Any]) -> list[TrackedObject]:
    """The tracked objects, in order, without loaders (they roll back by themselves) and each rank's generators."""
    objects: list[TrackedObject] = []
    modules = [target for target in state.values() if isinstance(target, torch.nn.Module)]
    tracked = {id(p) for module in modules for p in module.parameters()}
    for name, target in state.items():
        if isinstance(target, torch.nn.Module):
            objects.append(Module(name, target))
        elif isinstance(target, torch.optim.Optimizer):
            objects += [Optimizer(name, stepped(target), tracked), Hyperparameters(name, target)]
        elif isinstance(target, LRScheduler):
            objects.append(Schedule(name, target))
        elif (
            isinstance(target, torch.amp.GradScaler)
            or getattr(target, "everstep_per_rank", False)
            or digests.settles_itself(target)
        ):
            continue
        elif isinstance(target, dict | list | torch.Tensor | np.ndarray):
            objects.append(Tree(name, lambda target=target: target))  # type: ignore[misc]
        elif callable(getattr(target, "load_state_dict", None)) and name not in ELSEWHERE:
            objects.append(Tree(name, target.state_dict, target.load_state_dict))
    # Scalers come after the objects that hold them, whose `load_state_dict` may change the scaler too.
    return [*objects, *(Scaler(name, scaler) for name, scaler in scalers(state))]


def _is_large(buffer: torch.Tensor) -> bool:
    return layouts.is_dense(buffer) and layouts.size_of(buffer) > LARGE
