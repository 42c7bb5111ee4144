"""From what each member of a new round holds, who gives its state to whom. Pure.

Invariant: afterwards all members hold the same state, the newest that any of them has whole, or nobody had any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.recovery.validity import Validity


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member: completed steps, and a digest of what is replicated, by which silent divergence shows."""

    step: int
    validity: Validity
    digest: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """`holder` gives, `receivers` take; `diverged` are those of them that believed to be where the holder is. Without a
    `holder` nobody has a state: it comes from storage, or from rank 0's script."""

    step: int
    holder: int | None
    receivers: tuple[int, ...]
    diverged: tuple[int, ...] = ()


class NoState(RuntimeError):
    """Members trained, and no whole state is left among them: the last commit is what there is, if there is one."""


def agree(states: Sequence[MemberState]) -> Agreement:
    """By rank. The most steps win, then the better validity, then the lowest rank. Raises `NoState`."""
    usable = [(s.step, s.validity, -rank) for rank, s in enumerate(states) if s.validity > Validity.NONE]
    if not usable:
        if any(s.validity is Validity.TORN for s in states):
            raise NoState("every member lost its peers in the middle of what a step changes: no whole state is left")
        return Agreement(0, None, ())
    step, validity, negative = max(usable)
    holder = -negative
    best = states[holder]
    receivers = tuple(r for r, s in enumerate(states) if s != best)
    diverged = tuple(r for r in receivers if (states[r].step, states[r].validity) == (step, validity))
    return Agreement(step, holder, receivers, diverged)
