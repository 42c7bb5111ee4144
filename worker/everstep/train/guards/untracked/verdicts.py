"""Judges what a step has changed, by two looks at objects that the script holds and nothing tracked holds.

These are harmless, or cannot be judged: objects that do not change; a variable that each step binds again before it
reads it; a value that is overwritten before it is read; and an object that changes but, as far as was seen, affects no
parameter. A warning names the last kind, for the user to judge. Pure: it reads only the objects that it is given.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from everstep.train.guards.script_objects import Held
from everstep.train.guards.untracked.change_marks import Mark, full_digest, mark_of_array, marks_of
from everstep.train.guards.untracked.covered import keyword, word


@dataclass(frozen=True, slots=True)
class Seen:
    """A named tensor, array or queue as it was at one look. It is not kept alive."""

    held: weakref.ref[Any]
    mark: Mark

    def moved_to(self, now: Seen) -> bool:
        """Whether it is the same object, with other values."""
        return self.held() is not None and self.held() is now.held() and self.mark.moved_to(now.mark)


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. `line`: what to write instead."""

    name: str
    what: str
    line: str

    def __str__(self) -> str:
        return (
            f"{self.name} {self.what}, and nothing that is tracked holds it: a process that replaces a lost one starts "
            f"without it. Write {self.line}; or, if nothing is lost with it, run.untracked({self.name!r})"
        )


def track(name: str, taken: Collection[str] = ()) -> str:
    """The line that tracks `name`. `taken`: the names that are tracked already."""
    return f"run.track({keyword(name, taken)}={name}) before run.steps()"


def look(held: Iterable[Held], first: dict[str, Seen]) -> dict[str, Seen]:
    """The objects that can be compared, by name. `first`: each as it was first seen, or first written to; this adds to
    it."""
    listed = list(held)
    tensors = [h for h in listed if isinstance(h.value, torch.Tensor)]
    marked = [(h, m) for h, m in zip(tensors, marks_of([h.value for h in tensors]), strict=True) if m is not None]
    for h in listed:
        if isinstance(h.value, np.ndarray) and (mark := mark_of_array(h.value)) is not None:
            marked.append((h, mark))
        elif isinstance(h.value, deque) and h.value and not isinstance(h.value[-1], int | float | str):
            marked.append((h, Mark(id(h.value), (len(h.value),), id(h.value[-1]), 0, True)))
    found: dict[str, Seen] = {}
    for h, mark in marked:
        before = first.get(h.name)
        known = before is not None and before.held() is h.value
        if before is not None and known and before.mark.written_to(mark):
            mark = replace(mark, full=full_digest(h.value))  # noqa: PLW2901
            if before.mark.full is None and not before.mark.moved_to(mark):
                known = False
        found[h.name] = Seen(weakref.ref(h.value), mark)
        if not known:
            first[h.name] = found[h.name]
    return found


@dataclass(frozen=True, slots=True)
class Looks:
    """Looks at objects that nothing tracked holds: `first` when they were first seen, `begin` and `now` before and
    after a step. `held`: all objects of the script, by name. `reached`: those that were seen to affect parameters.
    `overwritten`: those that were overwritten before they were read. `drawn`: generators that changed. `shapes`: the
    shapes of trained tensors, counted for each tracked object. `taken`: the names of the tracked objects.
    `kept`: places in lists and mappings, each with the id of the tensor that lay there before and after the step.
    """

    first: Mapping[str, Seen]
    begin: Mapping[str, Seen]
    now: Mapping[str, Seen]
    held: Mapping[str, Held]
    reached: Collection[str]
    overwritten: Collection[str]
    drawn: Collection[str]
    shapes: Collection[Counter[tuple[int, ...]]]
    taken: Collection[str] = ()
    kept: Collection[tuple[str, int]] = ()


def judge(looks: Looks) -> tuple[list[Finding], list[str]]:
    """The findings to refuse, and the names of objects that change but may not matter."""
    moved = sorted(name for name, seen in looks.now.items() if name in looks.first and looks.first[name].moved_to(seen))
    found: dict[str, Finding] = {}
    for name in moved:
        if _is_parameter(looks.held[name].value):
            subject = subject_of(name, looks.held)
            found[subject] = Finding(subject, f"holds parameters that move ({name})", track(subject, looks.taken))
    for name in sorted(looks.reached):
        if (finding := _reaching(name, looks, moved)) is not None:
            found.setdefault(finding.name, finding)
    for subject in _copies(moved, looks):
        found.setdefault(
            subject, Finding(subject, "holds copies of the parameters that move", track(subject, looks.taken))
        )
    for name in looks.drawn:
        line = f"{track(name, looks.taken)}, and each step sets it"
        line += " (or draw from run.shared_rng, which is the same on all ranks)"
        found.setdefault(name, Finding(name, "is a random generator that moves in a step", line))
    open_ = sorted({subject_of(name, looks.held) for name in moved if name not in looks.overwritten} - found.keys())
    return [found[name] for name in sorted(found)], open_


def subject_of(name: str, held: Mapping[str, Held]) -> str:
    """What has to be tracked so that `name` is: the whole module, list or mapping of which it is a part."""
    for _ in range(32):
        owner = held.get(held[name].owner) if name in held else None
        if owner is None or not isinstance(owner.value, torch.nn.Module | Mapping | list | tuple):
            return name
        name = owner.name
    return name


def _reaching(name: str, looks: Looks, moved: list[str]) -> Finding | None:
    """The finding for a tensor on which the loss of the step depended. None if it is constant."""
    begin, now = looks.begin[name], looks.now.get(name)
    if name in moved:
        subject = subject_of(name, looks.held)
        line = track(subject, looks.taken)
        if isinstance(looks.held[subject].value, torch.nn.Module) and subject != name:
            line = f"self.register_buffer({word(name)!r}, …) in {subject}, and {track(subject, looks.taken)}"
        what = "changes from step to step" + ("" if subject == name else f" ({name})")
        return Finding(subject, f"{what}, and the loss depends on it", line)
    if now is not None and now.held() is begin.held():
        return None
    if now is not None and not begin.mark.moved_to(now.mark):
        return None  # it is made again with the same values
    if _is_kept(name, begin, looks):
        return None  # an element of a constant list, to which another variable was bound
    if now is not None and "." in name and now.mark.shape != begin.mark.shape:
        return None  # a cache that grows, of masks or of positions
    what = "is carried from one step to the next, and the loss depends on it"
    kept = word(name)
    line = (
        f"carried = {{{kept!r}: {name}}} and run.track({keyword('carried', looks.taken)}=carried) before run.steps(), "
        f"and use carried[{kept!r}]"
    )
    return Finding(name, what, line)


def _is_kept(name: str, begin: Seen, looks: Looks) -> bool:
    """Whether it lies where it lay before the step, with the same values, and was bound to a shorter name meanwhile."""
    value = begin.held()
    if value is None or (name, id(value)) not in looks.kept:
        return False
    return any(seen.held() is value and not begin.mark.moved_to(seen.mark) for seen in looks.now.values())


def _copies(moved: list[str], looks: Looks) -> list[str]:
    """The objects that hold a tensor of the shape of each trained parameter: an average, or a copy from an earlier
    step."""
    groups: dict[str, Counter[tuple[int, ...]]] = {}
    for name in moved:
        if isinstance(looks.held[name].value, torch.Tensor) and looks.held[name].value.is_floating_point():
            subject = subject_of(name, looks.held)
            groups.setdefault(subject, Counter())[looks.now[name].mark.shape] += 1
    several = [wanted for wanted in looks.shapes if sum(wanted.values()) > 1]
    return [subject for subject, shapes in groups.items() if any(shapes >= wanted for wanted in several)]


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or (
        isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    )
