"""Memory of a state that a commit has two values for: weights that are tied now and were not, and tensors that overlap.

What is in dicts and lists gives way (see `refilling`). Modules and tensors that the state holds itself are filled where
they are, and the last value would win. Invariant: what is one number there is not given two values without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.state.capture import Captured
from everstep.checkpoint.state.memory import row_of, same_bits, shows_twice, span
from everstep.checkpoint.state.sharding import local_of, placed_as


def check_ties(
    live: Mapping[str, Sequence[str]], captured: Captured, tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Raises `StateMismatch` if memory of a module, or of a tensor that the state holds itself, is to get two values:
    one tensor several of the commit's that are not the same, as weights that are tied now and were not when they were
    saved; or tensors that overlap. On all ranks if one of them has such a one; before anything is filled. Collective.
    `live`: the state's tensors that each of the commit's goes into."""
    sources: dict[str, list[str]] = {}
    for name in sorted(live.keys() & tensors.keys()):
        for own in live[name]:
            sources.setdefault(own, []).append(name)
    odd = []
    for own in sorted(sources.keys() & captured.filled):
        first, *others = sources[own]
        known = local_of(tensors[first])
        for name in others:
            tensor = local_of(tensors[name])
            if known.shape == tensor.shape and known.dtype == tensor.dtype and not same_bits(known, tensor):
                odd.append(
                    f"{own}: is tied in the state passed, and the commit holds {first} and {name} with different values"
                )
    memory = {own: local_of(captured.tensors[own]) for own in sources if own in captured.filled | captured.refilled}
    for names, begin, end in _heaps(memory):
        if captured.filled.isdisjoint(names):
            continue
        given = {own: _Given.of(captured.tensors[own], tensors[sources[own][0]]) for own in names}
        odd += [
            f"{one} and {other}: overlap in memory in the state passed, and the commit holds different values there"
            for one, other in _clashes({own: g for own, g in given.items() if g is not None}, begin, end)
            if {one, other} & captured.filled
        ]
    if ranks.maximum(int(bool(odd))):
        text = "; ".join(odd[:3]) or "tied tensors would get two values on another rank, which names them"
        raise StateMismatch(f"{text}. Nothing was changed. Untie them, or leave all but one out with exclude=")


@dataclass(frozen=True, slots=True)
class _Given:
    """A live tensor's memory, and the bytes that it is to hold, element by element."""

    memory: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, live: torch.Tensor, found: torch.Tensor) -> _Given | None:
        """None where the memory is not filled with `found` as it is: a module may read it in its own way."""
        if live.shape != found.shape or not live.numel() or shows_twice(local_of(live).shape, local_of(live).stride()):
            return None
        memory, value = local_of(live), local_of(placed_as(live, found)).to(live.dtype)
        value = value.conj() if memory.is_conj() else value
        return cls(memory, row_of(-value if memory.is_neg() else value))

    def within(self, place: torch.Tensor, begin: int) -> torch.Tensor:
        """The memory's bytes in `place`, which stands for the memory from address `begin` on."""
        size = self.memory.element_size()
        steps = (*(step * size for step in self.memory.stride()), 1)
        return place.as_strided((*self.memory.shape, size), steps, self.memory.data_ptr() - begin)

    def is_lost_to(self, other: _Given) -> bool:
        """Whether this is not there any more after `other` was filled as well."""
        (begin, end), (first, last) = span(self.memory), span(other.memory)
        if begin >= last or first >= end:
            return False
        begin = min(begin, first)
        place = torch.zeros(max(end, last) - begin, dtype=torch.uint8)
        self.write(place, begin)
        other.write(place, begin)
        return not self.is_in(place, begin)

    def write(self, place: torch.Tensor, begin: int) -> None:
        into = self.within(place, begin)
        into.copy_(self.rows.view(into.shape))

    def is_in(self, place: torch.Tensor, begin: int) -> bool:
        there = self.within(place, begin)
        return torch.equal(there, self.rows.view(there.shape))


def _clashes(given: Mapping[str, _Given], begin: int, end: int) -> list[tuple[str, str]]:
    """The names of which the memory, between these addresses, overlaps and cannot hold both values."""
    place = torch.zeros(end - begin, dtype=torch.uint8)
    for one in given.values():
        one.write(place, begin)
    # Of two that clash at least one has lost; whom it has lost to is looked for only then.
    lost = [name for name in given if not given[name].is_in(place, begin)]
    pairs = ((one, other) for one in lost for other in given if other != one)
    return sorted({(min(p), max(p)) for p in pairs if given[p[0]].is_lost_to(given[p[1]])})


def _heaps(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[list[str], int, int]]:
    """The names of tensors whose spans hang together, two or more, and where these begin and end."""
    heap: list[str] = []
    first = reach = 0
    for begin, end, name in [*sorted((*span(t), n) for n, t in tensors.items() if t.numel()), (-1, -1, "")]:
        if heap and 0 <= begin < reach:
            heap.append(name)
            reach = max(reach, end)
            continue
        if len(heap) > 1:
            yield heap, first, reach
        heap, first, reach = [name], begin, end
