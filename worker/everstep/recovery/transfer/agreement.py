"""Decides which member of a new round gives its state to which others. Pure.

Invariant: afterwards all members hold the same state, the newest that any of them has whole, or no member had one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.recovery.validity import Validity


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member: its completed steps, and a digest of its replicated state, which shows silent divergence."""

    step: int
    validity: Validity
    digest: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """`holder` sends its state to `receivers`. `diverged`: those receivers that had completed the same steps as the
    holder. Without a `holder` no member has a state: it comes from storage, or from rank 0's script."""

    step: int
    holder: int | None
    receivers: tuple[int, ...]
    diverged: tuple[int, ...] = ()


class NoState(RuntimeError):
    """Members trained, and no whole state is left among them. Only the last commit can help, if there is one."""


def agree(states: Sequence[MemberState]) -> Agreement:
    """The agreement of members given by rank. The most steps win, then the better validity, then the state that most
    members hold, then the lowest rank. Raises `NoState`."""
    alike = Counter(states)
    usable = [(s.step, s.validity, alike[s], -rank) for rank, s in enumerate(states) if s.validity > Validity.NONE]
    if not usable:
        if any(s.validity is Validity.TORN for s in states):
            raise NoState("every member lost its peers in the middle of what a step changes: no whole state is left")
        return Agreement(0, None, ())
    step, validity, _, negative = max(usable)
    holder = -negative
    best = states[holder]
    receivers = tuple(r for r, s in enumerate(states) if s != best)
    diverged = tuple(r for r in receivers if (states[r].step, states[r].validity) == (step, validity))
    return Agreement(step, holder, receivers, diverged)
