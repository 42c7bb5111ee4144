"""The commands by which an agent changes the job's document: the agent decides on one, and `machine` applies it.

Pure data. Each command names the agent that gives it. So it means the same whichever agent writes it, and may be
repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from everstep.contract.document import Member, Sizes


class Waited(IntEnum):
    """What a proposer has waited for, on its own clock, while the document did not change."""

    NOTHING = 0
    LAST_CALL = 1  # for more agents that may come
    REJOIN = 2  # for living members of the present round that do not ask for the next one


@dataclass(frozen=True, slots=True)
class Join:
    """`member` asks to be in the next round. The member writes it, or another agent that has read its join request."""

    member: Member
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Leave:
    agent: str
    why: str = "left"


@dataclass(frozen=True, slots=True)
class Withdraw:
    """`by` lost processes and leaves the round; the other members go on. It joins again when it has new processes."""

    by: str
    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Charge:
    """Charge a failure of the program in round `round` to the restart budget.

    The agent's process failed in that round, or was to come into the next one. Round 0: the agent was in none yet.
    `earlier`: how many failures of that round were known when the process was started. `unless_others`: no charge if
    another agent had a setback in the same round, or is asked to stop."""

    agent: str
    round: int
    why: str
    earlier: int = 0
    unless_others: bool = False


@dataclass(frozen=True, slots=True)
class Break:
    """The round ends although its members live, because they no longer work together. They join the next round."""

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
    """The job's processes keep their memory from round to round. So a new agent starts its own before it joins."""

    by: str
    round: int


@dataclass(frozen=True, slots=True)
class Stop:
    """`agent` is asked to stop. The round goes on; the other members only learn that they cannot count on it."""

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
    """`by` reaches `target` or does not. This proves nothing about either of them, so the report is on the pair."""

    by: str
    round: int
    target: str
    reaches: bool


@dataclass(frozen=True, slots=True)
class Form:
    """Form round `round` + 1 of the agents that wait. `shrink`: also if it has fewer members than the last one."""

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
    """No round follows. `outside`: before the first round, an agent that does not wait for it may close the job too."""

    by: str
    why: str
    outside: bool = False


# Commands that belong to one round; the agent is in it or waits for the next. `machine` refuses them in another round.
InRound = Withdraw | Drain | Break | Done | KeepProcesses | Evict | Reach | Form | SetBoundary
Command = InRound | Join | Leave | Stop | Charge | CloseJob
