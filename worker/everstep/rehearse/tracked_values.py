"""What `Record.tracked` has of tracked objects: a digest of each, and as text the numbers in those that are plain.

A number has a name of its own, because one that measures a time differs in each run, and what is beside it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everstep.checkpoint import RngState
from everstep.rehearse.record import BUFFERS, NUMBER
from everstep.train.guards import left_state
from everstep.train.guards.script_objects import is_own, unsaved_buffers

MOST_NUMBERS = 4096  # of one object; with more they are part of its digest


def digests(tracked: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Of the states of tracked objects, by name; and the names of those that cannot be read."""
    found, unread = dict[str, str](), list[str]()
    for name, value in tracked.items():
        try:
            found |= dict(_digests(name, value))
        except Exception as e:  # an object's own `state_dict` may raise anything
            unread.append(f"{name} ({type(e).__name__})")
    return found, unread


def _digests(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, RngState):
        return  # generators that nobody seeds or draws from differ in each run; a draw shows in what it is for
    if isinstance(value, torch.nn.Module) and (buffers := dict(value.named_buffers())):
        # These have names of their own among the script's values.
        unsaved = {id(buffer) for module in value.modules() for _, buffer in unsaved_buffers(module)}
        yield f"{BUFFERS}{name}", left_state.digest({k: b for k, b in buffers.items() if id(b) not in unsaved})
        value = {key: part for key, part in value.state_dict().items() if key not in buffers}
    elif not isinstance(value, torch.nn.Module | torch.optim.Optimizer) and (
        type(value) in (dict, list, tuple, int, float) or is_own(type(value))
    ):
        numbers = dict[str, str]()
        others = _without_numbers(name, value.state_dict() if hasattr(value, "state_dict") else value, numbers)
        if len(numbers) <= MOST_NUMBERS:
            yield from numbers.items()
            value = others
        if name in numbers:
            return
    yield name, left_state.digest(value)


def _without_numbers(name: str, value: Any, numbers: dict[str, str]) -> Any:
    """The value with the kind of each number in place of it. The numbers themselves are added to `numbers`."""
    if type(value) is dict and len(value) <= MOST_NUMBERS:
        return {key: _without_numbers(f"{name}[{key!r}]", part, numbers) for key, part in value.items()}
    if type(value) in (list, tuple) and len(value) <= MOST_NUMBERS:
        return [_without_numbers(f"{name}[{i}]", part, numbers) for i, part in enumerate(value)]
    number = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
    if type(number) not in (int, float):
        return value
    numbers[name] = f"{NUMBER}{number!r}"
    return f"a number: {type(value).__name__}"
