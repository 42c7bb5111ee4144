"""What the planner may know of a job's rounds: the view that the round store gives, and that a plan reads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from everstep.contract.document import Sizes


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The process of a member that ended round `round`; the member's agent starts another. `more`: how many others of
    that round ended too. `at`: when this leader saw it. `stood_seconds`: for how long it had made no progress by
    then."""

    round: int
    index: int
    incarnation: int
    at: datetime
    detail: str
    stood_seconds: float
    more: int = 0


@dataclass(frozen=True, slots=True)
class RoundView:
    """The round store's document, as far as a plan depends on it. A member in `gone` may still have a healthy pod: an
    agent whose processes were lost withdraws from the round, and joins the next."""

    round: int  # the last that was formed; 0: none yet
    members: tuple[tuple[int, int], ...] = ()  # (index, incarnation) of each, in rank order
    gone: tuple[int, ...] = ()  # indices of members that left it before they had finished
    joining: tuple[int, ...] = ()  # indices that wait for the next
    closed: str | None = None  # why there will be no further round
    finished: bool = False  # closed because the processes of all members have succeeded
    keeps: bool = False  # processes keep their memory from round to round
    sizes: Sizes | None = None  # that the operator set; None: agents keep those that they were started with
    surge: int = 0  # how many agents it has announced for the places of those that have to leave
    # As far as this leader has seen: (index, incarnation) of members of earlier rounds that have not come back since,
    # and when the newest of them left.
    left: tuple[tuple[int, int], ...] = ()
    left_at: datetime | None = None
    drained: frozenset[tuple[int, int]] = frozenset()  # those of `left` that were asked to stop, and left in order
    # As far as this leader has seen, oldest first: processes that ended a round, and that their agents replace.
    ends: tuple[ProcessEnd, ...] = ()
