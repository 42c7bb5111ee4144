"""What random numbers a step draws: a function of seed, step and rank, whichever process takes the step.

A process that takes the place of another one has drawn less than it, or more. So at each step all generators are set
anew: Python's, numpy's and torch's global ones, and those that the script tracks. A repeated step draws the same
numbers again, and what is drawn between two steps changes no step.

The seed is what rank 0's script had left in the generator when the run's first step began; it is agreed on by all ranks
and kept in the commits. Ranks that had the same there go on drawing the same numbers as one another (a function of seed
and step), because scripts rely on that: whether a layer is dropped must not depend on the rank. Ranks that differed,
because the script seeded by rank or not at all, draw by rank.

Invariant: of two (step, rank) whose numbers are to differ a generator gets different seeds, unless the product of the
steps and the ranks between them is 2^32 / 5 or more; numpy's global one in any case.
"""

from __future__ import annotations

import _random
import hashlib
import logging
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from everstep.checkpoint import RngState
from everstep.recovery.errors import LoopError
from everstep.recovery.state.mersenne_twister import NumpyTwister, PythonTwister
from everstep.recovery.state.shape import Shape

log = logging.getLogger("everstep.train")

# True: set at each step, by rank where the script's ranks differ. "rank": by rank in any case. "saved": left alone, and
# saved and restored by commits. False: left alone.
Rng = bool | Literal["rank", "saved"]

STATE: Final = "seeds"  # the name in a commit
AHEAD: Final = 64  # steps
REPLICA, ALL, NONE = 0, 1, 2  # ranks that draw the same numbers: those of a replica, all, none
WORD: Final = 2**32 - 1
# Near 2^32 divided by the golden ratio, and such that no partial quotient of its continued fraction over 2^32 is above
# 3: then the k-th multiple differs from 0, modulo 2^32, by more than 2^32 / 5k (Khinchin, Continued Fractions, ch. II).
GOLDEN: Final = 0x9E3778C1

_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # a method of the global generator
_seed: Any = _random.Random.seed
Gather = Callable[[Sequence[int]], list[tuple[int, ...]]]


def mix(word: int) -> int:
    """32 bits to 32 bits, one to one: the finalizer of MurmurHash3 (Austin Appleby, public domain)."""
    word = (word ^ word >> 16) * 0x85EBCA6B & WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & WORD
    return word ^ word >> 16


def words(seed: int, name: str) -> tuple[int, int]:
    """The two words by which the generator `name` of a run with this seed differs from all others."""
    data = struct.pack("<Q", seed) + name.encode()
    first, second = struct.unpack("<II", hashlib.blake2b(data, digest_size=8, person=b"everstep step").digest())
    return first, second


def derive(key: tuple[int, int], step: int, rank: int) -> int:
    """The 64 bits that a generator is set by. The lower 32 differ by themselves: torch's generator of the CPU and
    a `RandomState` take no more."""
    low = mix((step * GOLDEN + rank & WORD) ^ key[0])
    return mix(low ^ key[1]) << 32 | low


def derive_ahead(key: tuple[int, int], step: int, rank: int, steps: int) -> list[int]:
    """Of so many steps."""
    return [derive(key, step + i, rank) for i in range(steps)]


@dataclass(frozen=True, slots=True)
class Source:
    """One generator: `seed` sets it by 64 bits, and `state` tells where it is. One that has a `twister` is set by that,
    and not by `seed`."""

    seed: Callable[[int], object]
    state: Callable[[], object]
    twister: NumpyTwister | PythonTwister | None = None

    def fingerprint(self) -> int:
        """63 bits of where it is."""
        found = hashlib.blake2b(digest_size=8)
        _update(found, self.state())
        return int.from_bytes(found.digest(), "little") >> 1


def source_of(generator: Any) -> Source | None:
    """None for what is no generator. Raises `LoopError` for one that cannot be set."""
    match generator:
        case torch.Generator():
            return Source(generator.manual_seed, generator.get_state)
        case random.SystemRandom():
            raise LoopError("the numbers of a random.SystemRandom cannot be repeated; track a random.Random instead")
        case random.Random():
            return Source(generator.seed, generator.getstate)
        case np.random.Generator():
            return _bits(generator.bit_generator)
        case np.random.RandomState():
            return Source(lambda value: generator.seed(value & WORD), lambda: generator.get_state(legacy=False))
    return None


def global_sources(device: torch.device) -> dict[str, Source]:
    """The generators that a process has without making one. Not `torch.manual_seed`, which visits all devices and takes
    a hundred times as long."""
    found = {
        "torch": Source(torch.default_generator.manual_seed, torch.default_generator.get_state),
        "numpy": _numpy(),
        "python": _of_python(),
    }
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        own = torch.cuda.default_generators[device.index or 0]
        found["cuda"] = Source(own.manual_seed, own.get_state)
    return found


class GeneratorState:
    """A tracked `torch.Generator` as a commit holds it where generators are not set at each step: each rank's own."""

    everstep_per_rank = True

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["state"])


def generators_to_put_back(state: Mapping[str, Any]) -> list[Any]:
    """What a step that is repeated needs from before it, of a run's state: nothing where each step sets its own."""
    seeds = state.get(STATE)
    if isinstance(seeds, Randomness) and seeds.each_step:
        return []
    return [RngState(), *(t for t in state.values() if isinstance(t, GeneratorState))]


class Randomness:
    """The random numbers of a run. `start` when its state is to be restored, `settle` when it is and whenever the world
    has changed, `begin` at each step."""

    everstep_optional = True  # commits of older versions have none

    def __init__(self, rng: Rng, device: torch.device) -> None:
        if not isinstance(rng, bool) and rng not in ("rank", "saved"):
            raise LoopError(f"start(rng={rng!r}): True, 'rank', 'saved' or False is expected")
        self.each_step = rng is True or rng == "rank"
        self._by_rank = rng == "rank"
        self._device = device
        self._sources: dict[str, Source] = {}
        self._tracked: dict[str, Source] = {}
        self._generators: dict[str, Any] = {}  # what the sources of `_tracked` set: the census looks for them here
        self._own: dict[str, int] = {}  # what this process's script has left in each
        self._seeds: dict[str, int] = {}  # the run's
        self._alike: dict[str, int] = {}  # who draws the same numbers: one of the three; unknown in a world of one
        self._ready: list[tuple[Source, tuple[int, int], int]] = []
        # For `AHEAD` steps from the first on, of this rank: what sets each generator. Made together, because in a step
        # it would be computed by a processor whose caches hold the model.
        self._ahead: list[tuple[Callable[[int], object], list[int]]] = []
        self._numpy: list[tuple[NumpyTwister, list[tuple[memoryview, int]]]] = []
        self._python: list[tuple[PythonTwister, list[bytes]]] = []
        self._first, self._rank = 0, -1  # no rank: nothing is made yet
        self._shared: torch.Generator | None = None
        self._untouched: bytes | None = None  # the shared generator, as it was made before the first step
        self._step: int | None = None
        self.shape = Shape()  # of the run's mesh: the ranks of a replica draw alike

    def share(self, shape: Shape) -> None:
        """Ranks are to draw alike. Raises `LoopError` where the session does not set the generators."""
        if not self.each_step:
            raise LoopError(f"{shape} and start(rng=…): the ranks of a replica must draw the same numbers (dropout), "
                            "which the session sees to; leave `rng=` out, or write rng='rank'")  # fmt: skip

    def track(self, name: str, generator: Any) -> Any:
        """Take a generator that the script tracks under `name`; what its commits hold for that, None for nothing."""
        source = source_of(generator)
        assert source is not None
        if self.each_step:
            self._tracked[name] = source
            self._generators[name] = generator
            return None
        if not isinstance(generator, torch.Generator):
            raise LoopError(
                f"track({name}=…): a {type(generator).__qualname__} is set at each step, and with start(rng=True) "
                "alone; leave `rng=` out"
            )
        return GeneratorState(generator)

    def __contains__(self, name: str) -> bool:
        """Whether a generator is tracked under this name."""
        return name in self._tracked

    @property
    def generators(self) -> tuple[str, ...]:
        """The names of those that are tracked."""
        return tuple(self._tracked)

    def start(self) -> None:
        """Note what the script has seeded, before anything is restored."""
        if self.each_step:
            self._sources = global_sources(self._device) | {_tracked(n): s for n, s in self._tracked.items()}
        self._own = {name: source.fingerprint() for name, source in self._sources.items()}
        self._own["shared"] = Source(_nothing, torch.default_generator.get_state).fingerprint()
        if self._shared is not None and bytes(self._shared.get_state().numpy()) != self._untouched:
            raise LoopError(
                "run.shared_rng was drawn from before the first step: the ranks have agreed on its numbers only when "
                "`steps` has begun. Draw from it in the steps, and from a torch.Generator of your own before them"
            )

    def settle(self, gather: Gather) -> None:
        """Agree with the other ranks on what is not known yet. Collective."""
        names = sorted(self._own)
        told = gather([n for name in names for n in (self._seeds.get(name, -1), self._heard(name), self._own[name])])
        for i, name in enumerate(names):
            seeds, alike, own = ([rank[3 * i + j] for rank in told] for j in range(3))
            self._seeds[name] = next((s for s in seeds if s >= 0), own[0])
            if (known := max(alike)) >= 0:
                self._alike[name] = known
            elif len(told) > 1:
                self._alike[name] = self._who(name, own)
        self._make_ready()
        log.debug("random numbers by step: %s", self.state_dict())

    def begin(self, step: int, rank: int) -> None:
        """Set all generators for step number `step`, of the process that is rank `rank` now."""
        at = step - self._first
        if rank != self._rank or not 0 <= at < AHEAD:
            self._make_ahead(step, rank)
            at = 0
        self._step = step
        for seed, values in self._ahead:
            seed(values[at])
        # Both here, because a call of ours takes as long as the copy.
        for of_python, states in self._python:
            of_python.place[:] = states[at]
            of_python.generator.gauss_next = None
        for of_numpy, pairs in self._numpy:
            if of_numpy.beginning[0] != of_numpy.first:
                of_numpy.forget()
            with of_numpy.lock:
                of_numpy.place[:], of_numpy.first = pairs[at]

    def _make_ahead(self, step: int, rank: int) -> None:
        reader = rank // self.shape.readers
        self._ahead, self._numpy, self._python = [], [], []
        for source, key, alike in self._ready:
            which = (key, step, {ALL: 0, REPLICA: reader, NONE: rank}[alike], AHEAD)
            match source.twister:
                case NumpyTwister() as twister:
                    self._numpy.append((twister, twister.ahead(*which)))
                case PythonTwister() as twister:
                    self._python.append((twister, twister.ahead(derive_ahead(*which))))
                case None:
                    self._ahead.append((source.seed, derive_ahead(*which)))
        self._first, self._rank = step, rank

    @property
    def shared(self) -> torch.Generator:
        """A generator of the CPU whose numbers are a function of seed and step alone: the same on all ranks."""
        if self._shared is None:
            self._shared = torch.Generator()
            self._untouched = bytes(self._shared.get_state().numpy())
            if self._step is not None:
                self._make_ready()
                self._shared.manual_seed(derive(words(self._seeds["shared"], "shared"), self._step, 0))
        return self._shared

    def state_dict(self) -> dict[str, Any]:
        version = 2 if NONE in self._alike.values() else 1
        alike = {name: who if who == NONE else bool(who) for name, who in self._alike.items()}
        return {"version": version, "seeds": dict(self._seeds), "alike": alike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["version"] not in (1, 2):
            raise ValueError(f"version {state['version']}; this Everstep reads 1 and 2")
        self._seeds, self._alike = dict(state["seeds"]), {name: int(who) for name, who in state["alike"].items()}

    def _heard(self, name: str) -> int:
        return self._alike.get(name, -1)

    def _who(self, name: str, own: Sequence[int]) -> int:
        """Of what the ranks' scripts have left in a generator. Where a script divides its model over the ranks of a
        replica, one that it tracks and seeds otherwise in each is for masks of parts; the global ones it may have
        seeded so for the parts' first values."""
        places = self.shape.places
        replicas = [own[first : first + places] for first in range(0, len(own), places)]
        if len(set(own)) == 1:
            return ALL
        is_tracked = name in map(_tracked, self._tracked)
        return NONE if is_tracked and any(len(set(r)) > 1 for r in replicas) else REPLICA

    def _make_ready(self) -> None:
        self._rank = -1  # what is made ahead is of another world
        self._ready = [
            (source, words(self._seeds[name], name), self._drawn_by(name)) for name, source in self._sources.items()
        ]
        if self._shared is not None:
            source = Source(self._shared.manual_seed, self._shared.get_state)
            self._ready.append((source, words(self._seeds["shared"], "shared"), ALL))

    def _drawn_by(self, name: str) -> int:
        who = self._alike.get(name, REPLICA)
        return REPLICA if self._by_rank and who == ALL else who


def settle(state: Mapping[str, Any], gather: Gather) -> None:
    """`Randomness.settle`, of a run's state."""
    seeds = state.get(STATE)
    if isinstance(seeds, Randomness):
        seeds.settle(gather)


def _numpy() -> Source:
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stub has forgotten it

    def seed(value: int) -> None:
        np.random.set_state({**type(bits)(value).state, "has_gauss": 0, "gauss": 0.0})

    # The script may have put another one in its place.
    twister = NumpyTwister(bits) if isinstance(bits, np.random.MT19937) else None
    return Source(seed, lambda: np.random.get_state(legacy=False), twister)


def _of_python() -> Source:
    twister = PythonTwister(_python) if PythonTwister.fits(_python) else None
    return Source(_seed_python, random.getstate, twister)


def _bits(bits: Any) -> Source:
    def seed(value: int) -> None:
        bits.state = type(bits)(value).state

    return Source(seed, lambda: bits.state)


def _seed_python(value: int) -> None:
    """`random.seed(value)`, without what it does for values of other kinds."""
    _seed(_python, value)
    _python.gauss_next = None


def _tracked(name: str) -> str:
    """What a generator is called that the script tracks under `name`."""
    return f"tracked {name}"


def _nothing(_: int) -> None:
    """Of a generator that is only looked at."""


def _update(found: Any, value: Any) -> None:
    match value:
        case dict():
            for key in sorted(value):
                _update(found, key)
                _update(found, value[key])
        case torch.Tensor():
            found.update(value.numpy().tobytes())
        case np.ndarray():
            found.update(value.tobytes())
        case _:
            found.update(repr(value).encode())
