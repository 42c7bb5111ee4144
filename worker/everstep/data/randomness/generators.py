"""The random generators that an object holds: a dataset's and its transforms', a sampler's.

The global generators are seeded for each sample; what has generators of its own would draw by who read how many samples
before, and a new process would draw other numbers than the one that it replaces. So those are found, and seeded
alike. Looks only at attributes and small containers, within bounds: what is hidden deeper, or made anew for each
sample, is not found.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch

DEEPEST: Final = 7  # attributes of attributes; two of them are a mixture's list of sources
MOST: Final = 2000  # objects that are looked at
LARGEST: Final = 64  # entries of a container that is looked into

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, np.ndarray, torch.Tensor)


class Held:
    """One generator, whatever library it is of."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def seed(self, value: int) -> None:
        """Set it by 64 bits."""
        match self._generator:
            case torch.Generator() as found:
                found.manual_seed(value)
            case np.random.Generator() as found:
                found.bit_generator.state = type(found.bit_generator)(value).state
            case np.random.RandomState() as found:
                found.seed(value >> 32)
            case found:
                found.seed(value)

    def state(self) -> Any:
        match self._generator:
            case torch.Generator() as found:
                return found.get_state()
            case np.random.Generator() as found:
                return found.bit_generator.state
            case np.random.RandomState() as found:
                return found.get_state()
            case found:
                return found.getstate()

    def put_back(self, state: Any) -> None:
        match self._generator:
            case torch.Generator() as found:
                found.set_state(state)
            case np.random.Generator() as found:
                found.bit_generator.state = state
            case np.random.RandomState() as found:
                found.set_state(state)
            case found:
                found.setstate(state)


def held_by(owner: Any) -> tuple[Held, ...]:
    """The generators among the attributes of `owner`, and of what it holds."""
    return tuple(map(Held, _generators(owner)))


@contextmanager
def kept(generators: Iterable[Held]) -> Iterator[None]:
    """Put them back as they were."""
    before = [(generator, generator.state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            generator.put_back(state)


def _generators(owner: Any) -> Iterator[Any]:
    seen = {id(owner)}
    level = [owner]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for one in level:
            if isinstance(one, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
                yield one
                continue
            for part in _parts(one):
                if not isinstance(part, _LEAVES) and id(part) not in seen and len(seen) < MOST:
                    seen.add(id(part))
                    below.append(part)
        level = below


def _parts(one: Any) -> Iterator[Any]:
    if isinstance(one, dict):
        yield from one.values() if len(one) <= LARGEST else ()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from one if len(one) <= LARGEST else ()
    else:
        yield from list(getattr(one, "__dict__", {}).values())
        for kind in type(one).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if (part := getattr(one, name, None)) is not None:
                    yield part
