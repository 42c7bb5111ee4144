"""Refuses a run whose modules or optimizers get another structure in the loop: nobody could load its commits.

A new process makes what the script makes before its loop, and then takes the state. So names that have come or gone
since (pruning, a parametrization, a layer that was replaced, groups of an optimizer) fit nowhere. They are compared
after the 1st, 2nd, 4th, 8th, … step and before each save. Invariant: what is saved has the names and shapes of the
loop's beginning. Buffers whose size the session saves (`everstep.recovery.state.switches`) may have another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from everstep.checkpoint.state import layouts
from everstep.checkpoint.state.modules import bare
from everstep.checkpoint.state.sharding import is_sharded
from everstep.checkpoint.state.union import inside
from everstep.recovery.errors import LoopError
from everstep.recovery.rollback import snapshots
from everstep.recovery.state.switches import SWITCHES
from everstep.torch_private.modules import buffers_of, parameters_of, unsaved_of
from everstep.torch_private.sharded import is_flat

NAMED: Final = 3  # of what has come or gone, in an error

_Shape = tuple[int, ...] | None  # None: of a buffer that is None, or whose size may change


@dataclass(frozen=True, slots=True)
class _Structure:
    """`shapes` by path, those of lazy parameters left out; `lazy` are their paths. `groups`: of each optimizer, the
    paths of the parameters of each group; where they have none, or are sharded, only how many there are."""

    shapes: Mapping[str, _Shape]
    lazy: frozenset[str]
    groups: Mapping[str, tuple[tuple[str, ...] | int, ...]]


class StructureCheck:
    """Of the tracked `state`, as it is when the loop begins."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._began = _structure(state)
        self._known: int | None = None  # after this step it was as at the beginning
        self._boundaries = 0

    def step_over(self, step: int) -> None:
        """Compare after the 1st, 2nd, 4th, … step. Raises `LoopError`."""
        self._boundaries += 1
        if not self._boundaries & (self._boundaries - 1):
            self.check(step)

    def check(self, step: int) -> None:
        """Compare now, when `step` steps are complete. Raises `LoopError`."""
        now = _structure(self._state)
        if not (differences := _differences(self._began, now)):
            self._known = step
            if late := now.groups.keys() - self._began.groups.keys():  # a framework has made its optimizer by now
                groups = {**self._began.groups, **{key: now.groups[key] for key in late}}
                self._began = _Structure(self._began.shapes, self._began.lazy, groups)
            return
        known = step - 1 if self._known is None else self._known
        when = f"in step {step}" if step <= known + 1 else f"between step {known} and step {step}"
        raise LoopError(
            f"what is tracked has another structure than when the loop began. It changed {when}: "
            f"{'; '.join(differences)}. A "
            "new process makes what the script makes before its loop, so no commit of this could be loaded, and none "
            "was made. Make the change before the loop (prune, register_parametrization, add_param_group, new layers), "
            "or after it (prune.remove). To change a model that is half trained, end the run there (until=…), and "
            "begin another with a URL of its own, whose script makes the change and loads the old commit before the "
            "loop: everstep.load(url)"
        )


def _structure(state: Mapping[str, Any]) -> _Structure:
    _refuse_what_no_commit_holds(state)
    keeps_sizes = SWITCHES in state
    shapes: dict[str, _Shape] = {}
    lazy: set[str] = set()
    groups: dict[str, tuple[tuple[str, ...] | int, ...]] = {}
    paths: dict[int, str] = {}
    modules = {key: bare(t) for key, m in state.items() if isinstance(t := inside(m), torch.nn.Module)}
    for key, module in modules.items():
        for prefix, part in module.named_modules(remove_duplicate=False):
            for name, parameter in parameters_of(part).items():
                if parameter is None:
                    continue
                path = ".".join(filter(None, (key, prefix, name)))
                paths.setdefault(id(parameter), path)
                if is_lazy(parameter):
                    lazy.add(path)
                else:
                    shapes[path] = tuple(parameter.shape)
            for name, buffer in buffers_of(part).items():
                if name in unsaved_of(part) or (buffer is not None and is_lazy(buffer)):
                    continue
                shape = None if keeps_sizes or buffer is None else tuple(buffer.shape)
                shapes[".".join(filter(None, (key, prefix, name)))] = shape
    for key, marked in state.items():
        optimizer = getattr(inside(marked), "everstep_target", inside(marked))
        if isinstance(optimizer, torch.optim.Optimizer):
            groups[key] = tuple(_group(group["params"], paths) for group in optimizer.param_groups)
    return _Structure(shapes, frozenset(lazy), groups)


def _refuse_what_no_commit_holds(state: Mapping[str, Any]) -> None:
    """Raise `LoopError` for the first tensor of a layout that cannot be saved. This is checked when the loop begins: at
    the first save, training would be lost."""
    for path, tensor, is_saved in _tensors(state):
        if not is_lazy(tensor) and not (layouts.is_dense(tensor) if is_saved else layouts.is_copied(tensor)):
            raise LoopError(f"{path} is {layouts.kind_of(tensor)}, which no commit can hold. {layouts.advice(tensor)}")


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Each tensor with its name, and whether it is saved."""
    for key, marked in state.items():
        value = inside(marked)
        if isinstance(value, dict | list | torch.Tensor):
            yield from ((path, tensor, True) for path, tensor in snapshots.tensors(value, key))
        for prefix, part in bare(value).named_modules() if isinstance(value, torch.nn.Module) else ():
            for name, tensor in (*parameters_of(part).items(), *buffers_of(part).items()):
                if tensor is not None:
                    path = ".".join(filter(None, (key, prefix, name)))
                    yield path, tensor, name not in unsaved_of(part)


def _group(parameters: list[torch.Tensor], paths: Mapping[int, str]) -> tuple[str, ...] | int:
    """FSDP puts other objects into the modules between two steps, so what is sharded is only counted."""
    known = [paths.get(id(p)) for p in parameters if not is_sharded(p) and not is_flat(p)]
    named = [path for path in known if path is not None]
    return tuple(named) if len(named) == len(parameters) else len(parameters)


def _differences(began: _Structure, now: _Structure) -> list[str]:
    came = [n for n in now.shapes if n not in began.shapes and n not in began.lazy]
    gone = [n for n in began.shapes if n not in now.shapes]
    texts = []
    if came:
        texts.append(f"{_listed(came)} came")
    if gone:
        texts.append(f"{_listed(gone)} went")
    for name, shape in now.shapes.items():
        if name in began.shapes and (was := began.shapes[name]) != shape:
            texts.append(f"{name} has shape {_text(shape)}, and had {_text(was)}")
    for key, groups in now.groups.items():
        before = began.groups.get(key, groups)
        if len(before) != len(groups):
            texts.append(f"{key} has {len(groups)} groups of parameters, and had {len(before)}")
        else:
            for number, (was_in, is_in) in enumerate(zip(before, groups, strict=True)):
                texts += _moved(f"group {number} of {key}", was_in, is_in)
    more = len(texts) - NAMED
    return texts[:NAMED] + [f"and {more} more"] * (more > 0)


def _moved(group: str, before: tuple[str, ...] | int, now: tuple[str, ...] | int) -> list[str]:
    counts = [part if isinstance(part, int) else len(part) for part in (before, now)]
    if counts[0] != counts[1]:
        return [f"{group} has {counts[1]} parameters, and had {counts[0]}"]
    if before == now or isinstance(before, int):
        return []
    if isinstance(now, int):
        return [f"{group} holds parameters that no tracked module holds any more ({_listed(list(before))} were there)"]
    return [f"{group} has other parameters, or another order: {_listed([n for n in now if n not in before] or [*now])}"]


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + f" and {more} more" * (more > 0)


def _text(shape: _Shape) -> str:
    return "none" if shape is None else str(list(shape))
