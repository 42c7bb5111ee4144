"""Explicit-state exploration: visits every state a model can reach, breadth first, and checks an invariant in each.

It exists so that "every interleaving" is a fact with a number of states, not a hope about random schedules. It knows
nothing of jobs or logs. Breadth first means that the first violation found has the shortest possible trace. The order
of actions is the model's, hence deterministic: the same model gives the same states, counts and counterexample.

Method: the breadth-first search of TLC (Yu, Manolios, Lamport: Model checking TLA+ specifications, 1999), in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Model(Protocol[S]):
    """A transition system. States are immutable values; equal values are the same state."""

    def initial(self) -> S: ...

    def actions(self, state: S) -> Iterable[tuple[str, S]]:
        """Every step that can be taken, in a fixed order, as (label, next state)."""

    def canonical(self, state: S) -> Hashable:
        """The same value for states that differ only in names that no rule looks at; the state itself, if none do."""

    def violation(self, state: S) -> str | None:
        """What this state breaks, or None."""


@dataclass(frozen=True, slots=True)
class Report:
    states: int
    transitions: int
    depth: int
    violation: str | None = None
    trace: tuple[str, ...] = ()

    def describe(self) -> str:
        head = f"{self.states} states, {self.transitions} transitions, depth {self.depth}"
        if self.violation is None:
            return f"{head}: no violation"
        steps = "\n".join(f"  {i + 1:2}. {label}" for i, label in enumerate(self.trace))
        return f"{head}: {self.violation}\n{steps}"


class TooManyStatesError(RuntimeError):
    """The bound was hit, so nothing was proven: lower the model's bounds or raise the limit."""


def explore(model: Model[S], max_states: int, each: Callable[[S], str | None] | None = None) -> Report:
    """Visit all reachable states; stops at the first violation of the model's invariant or of `each`.

    Raises TooManyStatesError rather than returning a report that is not exhaustive.
    """
    start = model.initial()
    # Only one state of each class is kept, so that the labels of a trace belong together.
    seen: set[Hashable] = {model.canonical(start)}
    found: list[_Node[S]] = [_Node(start, None, "start", 0)]
    met: set[S] = {start}  # most transitions lead to a state that was met as it is: cheaper than its canonical form
    transitions = 0
    for node in found:  # grows while it is walked: this list is the queue
        wrong = model.violation(node.state) or (each(node.state) if each is not None else None)
        if wrong is not None:
            return Report(len(found), transitions, node.depth, wrong, node.trace())
        for label, following in model.actions(node.state):
            transitions += 1
            if following in met:
                continue
            met.add(following)
            key = model.canonical(following)
            if key not in seen:
                seen.add(key)
                found.append(_Node(following, node, label, node.depth + 1))
        if len(found) > max_states:
            raise TooManyStatesError(f"more than {max_states} states are reachable (depth {node.depth} so far)")
    return Report(len(found), transitions, found[-1].depth)


@dataclass(frozen=True, slots=True, eq=False)
class _Node(Generic[S]):
    state: S
    before: _Node[S] | None
    label: str
    depth: int

    def trace(self) -> tuple[str, ...]:
        labels: list[str] = []
        node = self
        while node.before is not None:
            labels.append(node.label)
            node = node.before
        return tuple(reversed(labels))
