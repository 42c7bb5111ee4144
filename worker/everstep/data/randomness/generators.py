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


class AnyGenerator:
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


def generators_of(owner: Any) -> tuple[AnyGenerator, ...]:
    """The generators among the attributes of `owner`, and of what it holds."""
    return tuple(map(AnyGenerator, _generators(owner)))


@contextmanager
def kept(generators: Iterable[AnyGenerator]) -> Iterator[None]:
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
        for node in level:
            if isinstance(node, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
                yield node
                continue
            for part in _parts(node):
                if not isinstance(part, _LEAVES) and id(part) not in seen and len(seen) < MOST:
                    seen.add(id(part))
                    below.append(part)
        level = below


def _parts(owner: Any) -> Iterator[Any]:
    if isinstance(owner, dict):
        yield from owner.values() if len(owner) <= LARGEST else ()
    elif isinstance(owner, list | tuple | set | frozenset):
        yield from owner if len(owner) <= LARGEST else ()
    else:
        yield from list(getattr(owner, "__dict__", {}).values())
        for kind in type(owner).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if (part := getattr(owner, name, None)) is not None:
                    yield part
