"""The kinds of tracked objects: what of each is copied when a step begins, what is watched, how it is put back.

Parameters and optimizer state fill the memory and are watched only: by torch's counts of changes, by identity and by
address. All that is small is copied, and buffers, because torch does not count BatchNorm's changes.

Invariant: after `begin`, unless `moved` names something, `put_back` brings the object to where it was at `begin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from everstep.train.randomness import STATE
from everstep.train.recovery import digests, fsdp, trees
from everstep.train.recovery.reducers import BUCKETS
from everstep.train.recovery.trees import Held, address, version
from everstep.train.switches import SWITCHES

ELSEWHERE = ("data", "rng", STATE, SWITCHES, BUCKETS)  # the session's own, which it puts back itself
LARGE = 2**20  # bytes of a buffer that is copied again only if torch has counted a change


class Thing:
    """One tracked object, or a part of one. `name` is the script's."""

    quiet = False  # it may well never move

    def __init__(self, name: str) -> None:
        self.name = name

    def look(self) -> None:
        """Find its parts anew. In steps that are watched."""

    def begin(self) -> None:
        """A step begins."""

    def moved(self) -> str | None:
        """The name of something that has changed since `begin` and has no copy."""
        return None

    def put_back(self) -> None:
        """Bring what was copied to where it was at `begin`."""

    def trace(self) -> Any:
        """What differs if anything of it has changed, as far as torch counts changes."""

    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its tensors that are not copied, by name."""
        yield from ()

    def copied(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are."""
        yield from ()


class Module(Thing):
    """Parameters are watched, buffers copied, and both put back in their places if forward has replaced them. So are
    `training` and `requires_grad`, which a step that fails may leave as its middle had them."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name)
        self._module = module
        self.quiet = next(module.parameters(), None) is None
        self._replaces = False  # its parameters get other storages from step to step
        self._addresses: dict[int, int] = {}  # of parameters, when it was last looked at
        self._parameters: list[torch.Tensor] = []
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []  # a dictionary of a module's, and its items
        self._version = 0
        self._buffers: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []
        self._large: dict[int, tuple[int, int]] = {}
        self._training: list[bool] = []
        self._required: list[bool] = []
        self.look()

    def look(self) -> None:
        modules = self._modules = list(self._module.modules())
        self._shards = [p.sharded_param for m in modules for p in fsdp.shards_of(m)]
        # Of modules that FSDP2 shards, forward takes the parameters' place.
        self._of_parameters = [m._parameters for m in modules if m._parameters and not self._shards]
        self._of_buffers: list[dict[str, Any]] = [m._buffers for m in modules if m._buffers]
        found = {id(p): address(p) for p in self._present()}
        if any(found.get(key, now) != now for key, now in self._addresses.items()):
            self._replaces = True
        self._addresses = found

    def begin(self) -> None:
        self._places = [(d, d.copy()) for d in (*self._of_parameters, *self._of_buffers)]
        self._parameters = self._present()
        self._version = _versions(self._parameters)
        self._training, self._required = self._switches()
        # An evaluation between two steps may have moved all of them (`module.to`).
        ends = self._parameters[:: max(1, len(self._parameters) - 1)]
        if self._replaces or any(self._addresses.get(id(p)) != address(p) for p in ends):
            self._addresses = {id(p): address(p) for p in self._parameters}
        self._save()

    def moved(self) -> str | None:
        known = self._addresses
        if _versions(self._parameters) == self._version and all(
            known.get(id(p)) == address(p) for p in self._parameters
        ):
            return None
        return self.name

    def put_back(self) -> None:
        for place, items in self._places:
            if len(place) != len(items) or any(place.get(k) is not v for k, v in items.items()):
                place.clear()
                place.update(items)
        for module, training in zip(self._modules, self._training, strict=True):
            if module.training is not training:
                module.training = training
        for parameter, required in zip(self._switchable(), self._required, strict=True):
            if parameter.requires_grad is not required:
                parameter.requires_grad_(required)
        with torch.no_grad():
            for buffer, saved in zip(self._buffers, self._saved, strict=True):
                buffer.copy_(saved)

    def trace(self) -> Any:
        tensors = [*self._present(), *(b for d in self._of_buffers for b in d.values() if b is not None)]
        return _versions(tensors), hash(tuple(map(id, tensors))), self._switches()

    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._shards:
            yield from ((f"{self.name}, shard {i}", p) for i, p in enumerate(self._shards))
        else:
            yield from ((f"{self.name}.{name}", p) for name, p in self._module.named_parameters())

    def copied(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"{self.name}.{name}", b) for name, b in self._module.named_buffers())

    def _present(self) -> list[torch.Tensor]:
        if self._shards:
            return [trees.raw(p) for p in self._shards]
        return [p for d in self._of_parameters for p in d.values() if p is not None]

    def _switchable(self) -> list[torch.Tensor]:
        return [] if self._shards else self._parameters

    def _switches(self) -> tuple[list[bool], list[bool]]:
        return [m.training for m in self._modules], [p.requires_grad for p in self._switchable()]

    def _save(self) -> None:
        live = [b for d in self._of_buffers for b in d.values() if b is not None]
        if len(live) != len(self._buffers) or any(a is not b for a, b in zip(live, self._buffers, strict=True)):
            self._buffers, self._saved, self._large = live, [b.detach().clone() for b in live], {}
            return
        to: list[torch.Tensor] = []
        source: list[torch.Tensor] = []
        for i, (buffer, saved) in enumerate(zip(live, self._saved, strict=True)):
            if buffer.shape != saved.shape or buffer.dtype != saved.dtype:
                self._saved[i] = buffer.detach().clone()
                continue
            if buffer.numel() * buffer.element_size() > LARGE:
                now = (version(buffer), address(buffer))
                if self._large.get(i) == now:
                    continue
                self._large[i] = now
            to.append(saved)
            source.append(buffer)
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, source)


class Optimizer(Thing):
    """Its state is watched. That its step has begun is for others to say."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(name)
        self._optimizer = optimizer
        self._loaded = 0
        self.hooks = [optimizer.register_load_state_dict_post_hook(self._load)]
        self.look()

    def _load(self, _: Any) -> None:
        self._loaded += 1

    def look(self) -> None:
        self._tensors = self._present()

    def _present(self) -> list[torch.Tensor]:
        states = [s for s in list(self._optimizer.state.values()) if isinstance(s, dict)]
        return [trees.raw(v) for s in states for v in s.values() if isinstance(v, torch.Tensor)]

    def begin(self) -> None:
        self._before = self._mark()

    def moved(self) -> str | None:
        return None if self._mark() == self._before else f"the state of {self.name}"

    def trace(self) -> Any:
        present = self._present()
        return self._loaded, _versions(present), len(present)

    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, state in enumerate(list(self._optimizer.state.values())):
            if isinstance(state, dict):
                yield from (
                    (f"{self.name}, {key} of parameter {i}", v)
                    for key, v in state.items()
                    if isinstance(v, torch.Tensor)
                )

    def _mark(self) -> tuple[int, int]:
        return self._loaded, _versions(self._tensors)


class Tree(Thing):
    """What `get` gives: nested values. `put` takes back what they were."""

    def __init__(self, name: str, get: Callable[[], Any], put: Callable[[Any], None] | None = None) -> None:
        super().__init__(name)
        self._get, self._put = get, put
        self._kept: Any = None
        self._held: list[Held] = []

    def begin(self) -> None:
        self._kept, self._held = trees.hold(self._get())

    def moved(self) -> str | None:
        return self.name if any(h.moved for h in self._held) else None

    def put_back(self) -> None:
        live = self._get()
        if trees.same(self._kept, live):
            return
        if self._put is not None:
            self._put(trees.plain(self._kept))
        else:
            trees.restore(live, self._kept)

    def trace(self) -> Any:
        try:
            return trees.trace(self._get())
        except Exception:  # the script's own, asked in the middle of a step
            return object()  # which equals nothing

    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        if any(h.copy is None for h in self._held):
            yield from trees.tensors(self._get(), self.name)


class Hyperparameters(Tree):
    """An optimizer's `param_groups` but for the parameters' values."""

    quiet = True

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
            trees.restore(group, kept)
            same[:] = parameters  # the list itself: LBFGS holds on to it
            group["params"] = same
        self.optimizer.param_groups[:] = [group for group, _, _ in self._groups]


class Schedule(Tree):
    """A learning rate's, or the like."""

    def __init__(self, name: str, schedule: Any) -> None:
        super().__init__(name, schedule.state_dict, schedule.load_state_dict)
        self._schedule = schedule
        # A plateau's schedule moves by a figure that is not here.
        self.by_hand = isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau)
        self.optimizer = getattr(schedule, "optimizer", None)

    def begin(self) -> None:
        super().begin()
        self._before = self.count()

    def count(self) -> int:
        """How often it has moved."""
        return _moves(self._schedule)

    def moves(self) -> int:
        """In this step."""
        return self.count() - self._before

    def step(self) -> None:
        self._schedule.step()


class Scaler(Tree):
    """A gradient scaler. Its `state_dict` would wait for the device."""

    def __init__(self, name: str, scaler: Any) -> None:
        super().__init__(name, self._read, self._write)
        self._scaler = scaler

    def _read(self) -> Any:
        return {k: v for k, v in vars(self._scaler).items() if k != "_per_optimizer_states"}

    def _write(self, kept: Any) -> None:
        for key, value in kept.items():
            setattr(self._scaler, key, value)

    def put_back(self) -> None:
        super().put_back()
        # Else it holds that the optimizer's gradients, which are gone, were unscaled. Only `update` says otherwise.
        self._scaler._per_optimizer_states.clear()


def things(state: Mapping[str, Any]) -> list[Thing]:
    """What is tracked, in order. A loader goes back by itself, and each rank's generators are for others."""
    found: list[Thing] = []
    for name, target in state.items():
        if isinstance(target, torch.nn.Module):
            found.append(Module(name, target))
        elif isinstance(target, torch.optim.Optimizer):
            found += [Optimizer(name, target), Hyperparameters(name, target)]
        elif isinstance(target, LRScheduler):
            found.append(Schedule(name, target))
        elif isinstance(target, torch.amp.GradScaler):
            if target.is_enabled():
                found.append(Scaler(name, target))
        elif getattr(target, "everstep_per_rank", False) or digests.settles_itself(target):
            continue
        elif isinstance(target, dict | list | torch.Tensor):
            found.append(Tree(name, lambda target=target: target))  # type: ignore[misc]
        elif callable(getattr(target, "load_state_dict", None)) and name not in ELSEWHERE:
            found.append(Tree(name, target.state_dict, target.load_state_dict))
    return found


def _moves(schedule: Any) -> int:
    parts = getattr(schedule, "_schedulers", ())  # of a chain, which has no count of its own
    own = getattr(schedule, "last_epoch", None)
    return int(own) if own is not None else max(map(_moves, parts), default=0)


def _versions(tensors: list[torch.Tensor]) -> int:
    try:
        return sum([t._version for t in tensors])  # a list is faster
    except RuntimeError:  # made in inference mode
        return sum(map(version, tensors))
