"""Decides which member of a new round gives its state to which others. Pure.

Invariant: afterwards all members hold the same state, the newest that any of them has whole, or no member had one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.recovery.validity import Validity


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member: its completed steps, and digests of its replicated state and of the parameters in it, which show
    silent divergence. `made`: the round in which it made the last of these steps or got them, because separated members
    may have made the same step twice, with other sums."""

    step: int
    validity: Validity
    digest: int
    parameters: int = 0
    made: int = field(default=0, compare=False)

    @property
    def version(self) -> tuple[int, Validity, int]:
        return self.step, self.validity, self.made


@dataclass(frozen=True, slots=True)
class Agreement:
    """`holder` sends its state to `receivers`. `diverged`: those receivers that had made the same steps in the same
    rounds as the holder. Without a `holder` no member has a state: it comes from storage, or from rank 0's script."""

    step: int
    holder: int | None
    receivers: tuple[int, ...]
    diverged: tuple[int, ...] = ()


class NoState(RuntimeError):
    """Members trained, and no whole state is left among them. Only the last commit can help, if there is one."""


def agree(states: Sequence[MemberState]) -> Agreement:
    """The agreement of members given by rank. The most steps win, then the better validity, then the steps that were
    made in a later round, then the parameters and then the state that most members hold, then the lowest rank. Raises
    `NoState`, also if parameters differ and none are those of the most: nobody knows which are right."""
    alike, votes = Counter(states), Counter((s.version, s.parameters) for s in states)
    usable = [
        (s.version, votes[s.version, s.parameters], alike[s], -rank)
        for rank, s in enumerate(states)
        if s.validity > Validity.NONE
    ]
    if not usable:
        if any(s.validity is Validity.TORN for s in states):
            raise NoState("every member lost its peers in the middle of what a step changes: no whole state is left")
        return Agreement(0, None, ())
    version, most, _, negative = max(usable)
    holder = -negative
    best = states[holder]
    if rival := [p for (v, p), count in votes.items() if v == version and count == most and p != best.parameters]:
        raise NoState(
            f"{_ranks(states, version, best.parameters)} hold other parameters than "
            f"{_ranks(states, version, rival[0])} after the same step {best.step}, and nobody knows which are right"
        )
    receivers = tuple(r for r, s in enumerate(states) if s != best)
    diverged = tuple(r for r in receivers if states[r].version == version)
    return Agreement(best.step, holder, receivers, diverged)


def _ranks(states: Sequence[MemberState], version: tuple[int, Validity, int], parameters: int) -> str:
    alike = [r for r, s in enumerate(states) if (s.version, s.parameters) == (version, parameters)]
    return f"ranks {alike}"
