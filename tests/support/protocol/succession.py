"""Who may form the next round: the store, the members that are left, or both. The model behind docs/adr/0072.

Members of one round die or are cut off, and the store stops and comes back. `members` have no clock and cannot tell a
store that has stopped from one that they do not reach. A world trains while all its members live and reach each other.
The invariant is that never two worlds train: the commit log would let only one of them save, so all the steps that the
other one made since its last commit would be lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import combinations
from typing import NamedTuple

from support.protocol.rules import SuccessionRule

Members = frozenset[int]


class Round(NamedTuple):
    living: Members
    beside_store: Members  # the members on the store's side of the network; the others reach each other
    store_runs: bool
    in_term: bool  # the store has answered everybody so lately that it gives none of their places away yet
    worlds: tuple[Members, ...]  # those formed so far; a member takes part in the newest that names it
    faults: int

    def reach_each_other(self, members: Members) -> bool:
        return members <= self.living and (members <= self.beside_store or not members & self.beside_store)

    def world_of(self, member: int) -> Members:
        return next(w for w in reversed(self.worlds) if member in w)

    def training(self) -> list[Members]:
        return [w for w in set(self.worlds) if self.reach_each_other(w) and all(self.world_of(m) == w for m in w)]


class SuccessionModel:
    """`rules` are those that hold beside the store's own: it forms the next world of the living that reach it."""

    def __init__(self, rules: frozenset[SuccessionRule], *, members: int = 3, faults: int = 2) -> None:
        self.rules, self.members, self.faults = rules, members, faults

    def initial(self) -> Round:
        everybody = frozenset(range(self.members))
        return Round(everybody, everybody, store_runs=True, in_term=True, worlds=(everybody,), faults=self.faults)

    def canonical(self, s: Round) -> Hashable:
        return s

    def violation(self, s: Round) -> str | None:
        worlds = s.training()
        if len(worlds) > 1:
            return "two worlds train: " + " and ".join(str(sorted(w)) for w in sorted(worlds, key=sorted))
        return None

    def actions(self, s: Round) -> Iterator[tuple[str, Round]]:
        if s.faults:
            spent = s._replace(faults=s.faults - 1)
            for m in sorted(s.living):
                yield f"member {m} dies", spent._replace(living=s.living - {m})
            if s.store_runs:
                yield "the store stops", spent._replace(store_runs=False)
            if len(s.beside_store) == self.members:
                for size in range(1, self.members):
                    for cut in combinations(range(self.members), size):
                        side = frozenset(range(self.members)) - set(cut)
                        yield (
                            f"members {list(cut)} are cut off from the others and the store",
                            spent._replace(beside_store=side),
                        )
        if not s.store_runs:
            yield "the store is back", s._replace(store_runs=True)
        if s.in_term and (not s.store_runs or len(s.beside_store) < self.members):
            yield "the term is over", s._replace(in_term=False)
        for by, world in self._next(s):
            yield f"{by} a world of {sorted(world)}", s._replace(worlds=(*s.worlds, world))

    def _next(self, s: Round) -> Iterator[tuple[str, Members]]:
        """The worlds that may form now: on each side of the network, if nobody there trains."""
        trained = frozenset[int]().union(*s.training())
        asks, cut_off = s.living & s.beside_store, s.living - s.beside_store
        if s.store_runs and asks and not asks & trained and self._store_may(s, asks):
            yield "the store forms", asks
        for alone in (cut_off,) if s.store_runs else (asks, cut_off):
            if alone and not alone & trained and self._members_may(s, alone):
                yield "the members form", alone

    def _store_may(self, s: Round, asks: Members) -> bool:
        last = s.world_of(min(asks))
        if SuccessionRule.STORE_NEEDS_MAJORITY in self.rules and 2 * len(asks & last) <= len(last):
            return False
        silent = last - asks
        return not (SuccessionRule.STORE_WAITS_FOR_TERM in self.rules and s.in_term and 2 * len(silent) > len(last))

    def _members_may(self, s: Round, alone: Members) -> bool:
        if SuccessionRule.MAJORITY_ALONE not in self.rules:
            return False
        last = s.world_of(min(alone))
        if 2 * len(alone & last) <= len(last):
            return False
        return SuccessionRule.STORE_WAITS_FOR_TERM not in self.rules or s.in_term


def goes_on(model: SuccessionModel, s: Round, *, store_returns: bool) -> str | None:
    """Whether some living members train if nothing more goes wrong; the reason if none ever do."""
    quiet = s._replace(faults=0)
    todo, seen = [quiet], {quiet}
    while todo:
        state = todo.pop()
        if state.training() or not state.living:
            return None
        for label, after in model.actions(state):
            if (store_returns or label != "the store is back") and after not in seen:
                seen.add(after)
                todo.append(after)
    return f"{sorted(s.living)} live and never train again"
