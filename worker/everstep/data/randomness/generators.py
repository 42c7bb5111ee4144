"""The random generators that an object holds: a dataset's and its transforms', a sampler's.

The global generators are seeded for each sample; what has generators of its own would draw by who read how many samples
before, and a new process would draw other numbers than the one that it replaces. So those are found, and seeded
alike. Looks only at attributes and small containers, within bounds: what is hidden deeper, or made anew for each
sample, is not found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

DEEPEST: Final = 7  # attributes of attributes; two of them are a mixture's list of sources
MOST: Final = 2000  # objects that are looked at
LARGEST: Final = 64  # entries of a container that is looked into
_WORD: Final = 2**32 - 1

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, np.ndarray, torch.Tensor)


class AnyGenerator(NamedTuple):
    """One generator, whatever library it is of. `seed` sets it by 64 bits, of which some use only the lower 32."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    put_back: Callable[[Any], object]


def access_to(generator: Any) -> AnyGenerator | None:
    """None for what is no generator."""
    match generator:
        case torch.Generator():
            return AnyGenerator(generator.manual_seed, generator.get_state, generator.set_state)
        case np.random.Generator():
            bits: Any = generator.bit_generator

            def put_back(state: Any) -> None:
                bits.state = state

            return AnyGenerator(lambda value: put_back(type(bits)(value).state), lambda: bits.state, put_back)
        case np.random.RandomState():
            state = partial(generator.get_state, legacy=False)
            return AnyGenerator(lambda value: generator.seed(value & _WORD), state, generator.set_state)
        case random.Random():
            return AnyGenerator(generator.seed, generator.getstate, generator.setstate)
    return None


@contextmanager
def kept(generators: Iterable[AnyGenerator]) -> Iterator[None]:
    """Put them back as they were."""
    before = [(generator, generator.state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            generator.put_back(state)


def generators_of(owner: Any) -> tuple[AnyGenerator, ...]:
    """The generators among the attributes of `owner`, and of what it holds."""
    return tuple(_generators(owner))


def _generators(owner: Any) -> Iterator[AnyGenerator]:
    seen = {id(owner)}
    level = [owner]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for node in level:
            if (generator := access_to(node)) is not None:
                yield generator
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
