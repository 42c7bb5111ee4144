"""Makes the random numbers of a step a function of seed, step and rank, whichever process takes the step.

A process that replaces another has drawn fewer random numbers than that one, or more. So at each step all generators
are set: the global ones of Python, numpy and torch, and those that the script tracks. A repeated step draws the same
numbers again, and draws between two steps have no effect on any step.

The seed is the state of rank 0's generator when the run's first step began. All ranks agree on it, and commits keep it.
Ranks whose generators were equal then go on drawing equal numbers (a function of seed and step), because scripts rely
on that: whether a layer is dropped must not depend on the rank. Ranks whose generators differed, because the script
seeded by rank or not at all, draw by rank.

Invariant: if the numbers of two (step, rank) are to differ, a generator gets different seeds for them, unless the
product of the steps and the ranks between them is 2^32 / 5 or more. Numpy's global generator always gets different
ones.
"""

from __future__ import annotations

import _random
import ctypes
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
from everstep.data.randomness.generators import access_to
from everstep.recovery.errors import LoopError
from everstep.recovery.state.shape import Shape

# --- mersenne twister
# Sets the global generators of numpy and Python at each step, at the price of a copy. Both are Mersenne Twisters of 624
# words, and seeding them takes longer than all else that a step's random numbers need. So their states are made ahead,
# for many steps at once. Numpy's words are drawn by Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as
# 1, 2, 3, SC'11): a bijection of a counter, which passes BigCrush. Each step and rank has its own part of the counter.
# So the states of a run are as independent as Philox's words, and do not depend on where a process begins. Python's
# words are those that `random.seed` makes. Between two steps the model fills the processor's caches, so this code and
# its data are never in them. Therefore the work of a step is short here, and uses few objects.

WORDS: Final = 624  # of 32 bits
COUNTERS: Final = WORDS // 8  # each makes eight words
BEGINNING: Final = slice(8)  # bytes of a state


class NumpyTwister:
    """Sets numpy's generator. `bits`: numpy's MT19937. Its state in memory is 624 words and the number of used ones;
    numpy gives the address. To set it, hold `lock` and copy one of `ahead` to `memory`; keep its second part as
    `first`. Call `forget` before, unless `beginning[0]` is still `first`: a draw changes all words.
    """

    __slots__ = ("_bits", "beginning", "first", "lock", "memory")

    def __init__(self, bits: Any) -> None:
        self._bits = bits
        self.lock = bits.lock  # without it a draw in another thread could find all words used, and use one more
        self.memory = _memory(bits.ctypes.state_address)
        self.beginning = self.memory[BEGINNING].cast("Q")
        self.first = -1

    def ahead(self, key: tuple[int, int], step: int, rank: int, steps: int) -> list[tuple[memoryview, int]]:
        """For each of so many steps from this one: the state, and its bytes at `BEGINNING`."""
        if np.random.get_bit_generator() is not self._bits:  # type: ignore[attr-defined]  # not in numpy's stub
            raise LoopError(
                "np.random.set_bit_generator(…) in the loop: the numbers of the new one do not follow from the step. "
                "Call it before run.steps(), or draw from a generator that is tracked: run.track(noise=generator)"
            )
        counter = np.array([step * COUNTERS, 0, rank, 0], np.uint64)
        philox = np.random.Philox(counter=counter, key=np.array([key[0] << 32 | key[1], 0], np.uint64))
        drawn: Any = philox.random_raw(steps * WORDS // 2)
        rows: Any = np.full((steps, WORDS + 1), WORDS, np.uint32)  # all words are used: the first draw makes new ones
        rows[:, :WORDS] = drawn.view(np.uint32).reshape(steps, WORDS)
        states = [memoryview(row).cast("B") for row in rows]
        return [(state, state[BEGINNING].cast("Q")[0]) for state in states]

    def forget(self) -> None:
        """Forget the second one of a pair of normal numbers, which numpy keeps for the next call."""
        np.random.seed(0)


class PythonTwister:
    """Sets Python's generator. `generator`: a `random.Random`. Its state in memory is the number of used words and 624
    words, after the header of each object. To set it, copy one of `ahead` to `memory`, and set its `gauss_next` to
    None."""

    __slots__ = ("generator", "memory")

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.memory = _memory(id(generator) + object.__basicsize__)

    @staticmethod
    def fits(generator: Any) -> bool:
        """Whether this interpreter keeps the state at that place."""
        end = object.__basicsize__ + 4 * (WORDS + 1)
        if not end <= _random.Random.__basicsize__ < end + 8:
            return False
        *words, used = generator.getstate()[1]
        return list(_memory(id(generator) + object.__basicsize__).cast("I")) == [used, *words]

    @staticmethod
    def ahead(values: Sequence[int]) -> list[bytes]:
        """The states that `random.seed` makes of these values."""
        scratch = _random.Random()
        state, states = _memory(id(scratch) + object.__basicsize__), []
        for value in values:
            scratch.seed(value)
            states.append(bytes(state))
        return states


def _memory(address: int) -> memoryview:
    """The memory of a twister's state at this address."""
    return memoryview((ctypes.c_uint8 * (4 * (WORDS + 1))).from_address(address)).cast("B")


# --- randomness

log = logging.getLogger("everstep.train")

# True: generators are set at each step, by rank if the script's ranks differ. "rank": always by rank. "saved": they are
# not set, but commits save and restore them. False: they are not set.
Rng = bool | Literal["rank", "saved"]

STATE: Final = "seeds"  # the name in a commit
AHEAD: Final = 64  # steps
REPLICA, ALL, NONE = 0, 1, 2  # which ranks draw the same numbers: those of a replica, all, none
WORD: Final = 2**32 - 1
# The number is near 2^32 divided by the golden ratio, and no partial quotient of its continued fraction over 2^32 is
# above 3. So its k-th multiple differs from 0, modulo 2^32, by more than 2^32 / 5k (Khinchin, Continued Fractions, ch.
# II).
GOLDEN: Final = 0x9E3778C1

_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # a method of the global generator
_seed: Any = _random.Random.seed
Gather = Callable[[Sequence[int]], list[tuple[int, ...]]]


def mix(word: int) -> int:
    """A bijection of 32 bits: the finalizer of MurmurHash3 (Austin Appleby, public domain)."""
    word = (word ^ word >> 16) * 0x85EBCA6B & WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & WORD
    return word ^ word >> 16


def words(seed: int, name: str) -> tuple[int, int]:
    """The two words that tell the generator `name` of a run with this seed from all others."""
    data = struct.pack("<Q", seed) + name.encode()
    first, second = struct.unpack("<II", hashlib.blake2b(data, digest_size=8, person=b"everstep step").digest())
    return first, second


def derive(key: tuple[int, int], step: int, rank: int) -> int:
    """The 64 bits with which a generator is set. The lower 32 differ already: torch's generator of the CPU and a
    `RandomState` use only those."""
    low = mix((step * GOLDEN + rank & WORD) ^ key[0])
    return mix(low ^ key[1]) << 32 | low


def derive_ahead(key: tuple[int, int], step: int, rank: int, steps: int) -> list[int]:
    """The same for so many steps."""
    return [derive(key, step + i, rank) for i in range(steps)]


@dataclass(frozen=True, slots=True)
class Source:
    """One generator. `seed` sets it by 64 bits, and `state` returns its state. If it has a `twister`, that sets it, and
    not `seed`."""

    seed: Callable[[int], object]
    state: Callable[[], object]
    twister: NumpyTwister | PythonTwister | None = None

    def fingerprint(self) -> int:
        """A digest of its state, in 63 bits."""
        digest = hashlib.blake2b(digest_size=8)
        _update(digest, self.state())
        return int.from_bytes(digest.digest(), "little") >> 1


def source_of(generator: Any) -> Source | None:
    """The source for a generator; None for any other object. Raises `LoopError` for a generator that cannot be set."""
    if isinstance(generator, random.SystemRandom):
        raise LoopError("the numbers of a random.SystemRandom cannot be repeated; track a random.Random instead")
    access = access_to(generator)
    return None if access is None else Source(access.seed, access.state)


def global_sources(device: torch.device) -> dict[str, Source]:
    """The generators that each process has. They are set one by one: `torch.manual_seed` visits all devices and takes a
    hundred times as long."""
    sources = {
        "torch": Source(torch.default_generator.manual_seed, torch.default_generator.get_state),
        "numpy": _numpy(),
        "python": _of_python(),
    }
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        own = torch.cuda.default_generators[device.index or 0]
        sources["cuda"] = Source(own.manual_seed, own.get_state)
    return sources


class GeneratorState:
    """A tracked `torch.Generator` as a commit stores it, if generators are not set at each step: each rank has its
    own."""

    everstep_per_rank = True

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["state"])


def generators_to_put_back(state: Mapping[str, Any]) -> list[Any]:
    """The generators in a run's state that a repeated step needs as they were: none if each step sets its own."""
    seeds = state.get(STATE)
    if isinstance(seeds, Randomness) and seeds.each_step:
        return []
    return [RngState(), *(t for t in state.values() if isinstance(t, GeneratorState))]


class Randomness:
    """The random numbers of a run. Call `start` before its state is restored, `agree` after that and whenever the
    world has changed, and `begin` at each step."""

    everstep_optional = True  # commits of runs without a session lack it

    def __init__(self, rng: Rng, device: torch.device) -> None:
        if not isinstance(rng, bool) and rng not in ("rank", "saved"):
            raise LoopError(f"start(rng={rng!r}): True, 'rank', 'saved' or False is expected")
        self.each_step = rng is True or rng == "rank"
        self._by_rank = rng == "rank"
        self._device = device
        self._sources: dict[str, Source] = {}
        self._tracked: dict[str, Source] = {}
        self._generators: dict[str, Any] = {}  # the tracked generators: the untracked-state check looks for them here
        self._own: dict[str, int] = {}  # the state in which this process's script left each
        self._seeds: dict[str, int] = {}  # the run's seeds
        self._alike: dict[str, int] = {}  # which ranks draw the same numbers; unknown in a world of one
        self._ready: list[tuple[Source, tuple[int, int], int]] = []
        # For `AHEAD` steps from the first on, of this rank: the values that set each generator. They are made together,
        # because in a step the processor's caches hold the model.
        self._ahead: list[tuple[Callable[[int], object], list[int]]] = []
        self._numpy: list[tuple[NumpyTwister, list[tuple[memoryview, int]]]] = []
        self._python: list[tuple[PythonTwister, list[bytes]]] = []
        self._first, self._rank = 0, -1  # rank -1: nothing is made yet
        self._shared: torch.Generator | None = None
        self._untouched: bytes | None = None  # the shared generator's state before the first step
        self._step: int | None = None
        self.shape = Shape()  # the run's mesh: the ranks of a replica draw the same numbers

    def share(self, shape: Shape) -> None:
        """Let the ranks of a replica draw the same numbers. Raises `LoopError` if the session does not set the
        generators."""
        if not self.each_step:
            raise LoopError(f"{shape} and start(rng=…): the ranks of a replica must draw the same numbers (dropout), "
                            "which the session sees to; leave `rng=` out, or write rng='rank'")  # fmt: skip

    def track(self, name: str, generator: Any) -> Any:
        """Take a generator that the script tracks under `name`. Return the object that commits store for it; None if
        they store nothing."""
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
        """The names of the tracked generators."""
        return tuple(self._tracked)

    def sources(self) -> dict[str, Source]:
        """The generators of this process, and those that the script tracks where each step sets them."""
        return global_sources(self._device) | self._tracked

    def start(self) -> None:
        """Note the script's seeds, before anything is restored."""
        if self.each_step:
            self._sources = global_sources(self._device) | {_tracked(n): s for n, s in self._tracked.items()}
        self._own = {name: source.fingerprint() for name, source in self._sources.items()}
        self._own["shared"] = Source(_nothing, torch.default_generator.get_state).fingerprint()
        if self._shared is not None and bytes(self._shared.get_state().numpy()) != self._untouched:
            raise LoopError(
                "run.shared_rng was drawn from before the first step: the ranks have agreed on its numbers only when "
                "`steps` has begun. Draw from it in the steps, and from a torch.Generator of your own before them"
            )

    def agree(self, gather: Gather) -> None:
        """Agree with the other ranks on the seeds that are not known yet. Collective."""
        names = sorted(self._own)
        gathered = gather(
            [n for name in names for n in (self._seeds.get(name, -1), self._who_draws_alike(name), self._own[name])]
        )
        for i, name in enumerate(names):
            seeds, alike, own = ([rank[3 * i + j] for rank in gathered] for j in range(3))
            self._seeds[name] = next((s for s in seeds if s >= 0), own[0])
            if (known := max(alike)) >= 0:
                self._alike[name] = known
            elif len(gathered) > 1:
                self._alike[name] = self._who(name, own)
        self._make_ready()
        log.debug("random numbers by step: %s", self.state_dict())

    def begin(self, step: int, rank: int) -> None:
        """Set all generators for step number `step`, in the process that has rank `rank` now."""
        at = step - self._first
        if rank != self._rank or not 0 <= at < AHEAD:
            self._make_ahead(step, rank)
            at = 0
        self._step = step
        for seed, values in self._ahead:
            seed(values[at])
        # Both are written out here, because a call of a function of ours takes as long as the copy.
        for of_python, states in self._python:
            of_python.memory[:] = states[at]
            of_python.generator.gauss_next = None
        for of_numpy, pairs in self._numpy:
            if of_numpy.beginning[0] != of_numpy.first:
                of_numpy.forget()
            with of_numpy.lock:
                of_numpy.memory[:], of_numpy.first = pairs[at]

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
        return {"seeds": dict(self._seeds), "alike": dict(self._alike)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seeds, self._alike = dict(state["seeds"]), dict(state["alike"])

    def _who_draws_alike(self, name: str) -> int:
        return self._alike.get(name, -1)

    def _who(self, name: str, own: Sequence[int]) -> int:
        """Which ranks draw the same numbers, by the states in which their scripts left a generator. If a script divides
        its model over the ranks of a replica, and seeds a tracked generator differently in each, that is for masks of
        parts. It may have seeded the global ones so only for the parts' first values."""
        model_size = self.shape.model_size
        replicas = [own[first : first + model_size] for first in range(0, len(own), model_size)]
        if len(set(own)) == 1:
            return ALL
        is_tracked = name in map(_tracked, self._tracked)
        return NONE if is_tracked and any(len(set(r)) > 1 for r in replicas) else REPLICA

    def _make_ready(self) -> None:
        self._rank = -1  # the values made ahead are of another world
        self._ready = [
            (source, words(self._seeds[name], name), self._drawn_by(name)) for name, source in self._sources.items()
        ]
        if self._shared is not None:
            source = Source(self._shared.manual_seed, self._shared.get_state)
            self._ready.append((source, words(self._seeds["shared"], "shared"), ALL))

    def _drawn_by(self, name: str) -> int:
        who = self._alike.get(name, REPLICA)
        return REPLICA if self._by_rank and who == ALL else who


def agree_on_seeds(state: Mapping[str, Any], gather: Gather) -> None:
    """Call `Randomness.agree` for a run's state."""
    seeds = state.get(STATE)
    if isinstance(seeds, Randomness):
        seeds.agree(gather)


def _numpy() -> Source:
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stub has forgotten it

    def seed(value: int) -> None:
        np.random.set_state({**type(bits)(value).state, "has_gauss": 0, "gauss": 0.0})

    # The script may have replaced the generator.
    twister = NumpyTwister(bits) if isinstance(bits, np.random.MT19937) else None
    return Source(seed, lambda: np.random.get_state(legacy=False), twister)


def _of_python() -> Source:
    twister = PythonTwister(_python) if PythonTwister.fits(_python) else None
    return Source(_seed_python, random.getstate, twister)


def _seed_python(value: int) -> None:
    """The same as `random.seed(value)`, without its handling of other kinds of values."""
    _seed(_python, value)
    _python.gauss_next = None


def _tracked(name: str) -> str:
    """The internal name of a generator that the script tracks under `name`."""
    return f"tracked {name}"


def _nothing(_: int) -> None:
    """The setter of a generator that is only read."""


def _update(digest: Any, value: Any) -> None:
    match value:
        case dict():
            for key in sorted(value):
                _update(digest, key)
                _update(digest, value[key])
        case torch.Tensor():
            digest.update(value.numpy().tobytes())
        case np.ndarray():
            digest.update(value.tobytes())
        case _:
            digest.update(repr(value).encode())
