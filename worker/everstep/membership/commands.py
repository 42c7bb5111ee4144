"""What an agent may ask of the job's document: one set of commands, which the agent decides and `machine` applies.

Pure data. Each command names the agent that gives it, so it means the same whoever writes it and however often.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from everstep.contract.document import Member, Sizes


class Waited(IntEnum):
    """For what a proposer has waited, on its own clock, while the document did not change."""

    NOTHING = 0
    LAST_CALL = 1  # for whoever might still come
    REJOIN = 2  # for living members of the present round that do not ask for the next


@dataclass(frozen=True, slots=True)
class Join:
    """`member` asks to be in the next round. Written by itself, or by whoever read its join request."""

    member: Member
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Leave:
    agent: str
    why: str = "left"


@dataclass(frozen=True, slots=True)
class Withdraw:
    """`by` lost processes: it is out of the round, whose other members go on. It joins again when it has new ones."""

    by: str
    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Charge:
    """The program's own fault ended round `round` at the agent, or a process that was to come into the next one.
    `earlier`: failures in that round that were known when the process was started. Round 0: it was in none yet.
    `unless_others`: it is nobody's fault here if another agent set the same round back, or is asked to stop."""

    agent: str
    round: int
    why: str
    earlier: int = 0
    unless_others: bool = False


@dataclass(frozen=True, slots=True)
class Break:
    """The members live, but they do not work together any more: they meet again in the next round."""

    by: str
    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """All processes of `by` have succeeded. The last member to say so finishes the job."""

    by: str
    round: int


@dataclass(frozen=True, slots=True)
class KeepProcesses:
    """The job's processes keep their memory from round to round: a new agent gets its own ready before it joins."""

    by: str
    round: int


@dataclass(frozen=True, slots=True)
class Stop:
    """`agent` is asked to stop. That changes nothing yet: it says what the others may not count on."""

    agent: str


@dataclass(frozen=True, slots=True)
class Drain:
    """All members that are asked to stop leave the round together, and the others go on."""

    by: str
    round: int


@dataclass(frozen=True, slots=True)
class Evict:
    """`by` has proof that `agent` is gone: its lease expired, or its address refuses connections."""

    by: str
    round: int
    agent: str
    why: str


@dataclass(frozen=True, slots=True)
class Reach:
    """`by` does (not) reach `target`: no proof of anything about one of them, so the pair is judged."""

    by: str
    round: int
    target: str
    reaches: bool


@dataclass(frozen=True, slots=True)
class Form:
    """Form the round `round` + 1 of the agents that wait. `shrink`: also if it has fewer members than the last one."""

    by: str
    round: int
    waited: Waited
    shrink: bool = True


@dataclass(frozen=True, slots=True)
class SetBoundary:
    """The members of a running round let joiners in after `step`."""

    by: str
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class CloseJob:
    """`outside`: also by an agent that neither is in a round nor waits for one, while there was none yet."""

    by: str
    why: str
    outside: bool = False


# Decided in a round, by an agent that is in it or waits for the next: `machine` refuses another round's.
InRound = Withdraw | Drain | Break | Done | KeepProcesses | Evict | Reach | Form | SetBoundary
Command = InRound | Join | Leave | Stop | Charge | CloseJob
