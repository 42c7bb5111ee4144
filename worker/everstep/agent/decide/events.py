"""Events and instructions: `loop` gives events to `decide`, which answers with instructions for `loop`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from everstep.contract.document import Setback
from everstep.membership.commands import Break, Charge, CloseJob, Done, Drain, KeepProcesses, Stop, Withdraw
from everstep.membership.world_state import Round, WorldState

# --- events


@dataclass(frozen=True, slots=True)
class Began:
    """The agent starts. `keeps`: the job's other processes keep their memory from round to round."""

    keeps: bool


@dataclass(frozen=True, slots=True)
class Formed:
    """This agent is in a new round. `history`: the job's newest setbacks. `stopping`: agents that are asked to stop."""

    round: Round
    keeps: bool
    history: tuple[Setback, ...]
    stopping: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotFormed:
    """There is no round for this agent, now or later. `finished`: because the job has succeeded."""

    why: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class ProcessesFirst:
    """This agent has given up its place in the queue: the job's processes keep their memory, so it starts its own
    before it joins."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The world state of this agent's round has changed."""

    round: int
    world_state: WorldState


class Fault(Enum):
    """Whose fault the end of a process was."""

    PROGRAM = auto()  # the training program's own
    PEER = auto()  # the process says that it lost a peer: perhaps another process's fault
    OUTSIDE = auto()  # killed from outside
    REFUSED = auto()  # the training program's own, and a restart would not help: the session refuses its first steps
    LEAVER = auto()  # another agent is asked to stop, and the end of its processes ended this one; the others go on


@dataclass(frozen=True, slots=True)
class Exited:
    """A process ended: `code` 0 to 255, or minus the signal."""

    slot: int
    pid: int
    code: int
    fault: Fault
    why: str


@dataclass(frozen=True, slots=True)
class Hello:
    """A process has connected to the agent: it uses the session, so it recovers in process."""

    slot: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A process has built its model and optimizer, and waits for a round."""

    slot: int
    pid: int


@dataclass(frozen=True, slots=True)
class Entered:
    """A process has interrupted its training for round `round`, and waits for the round's other members."""

    slot: int
    pid: int
    round: int


@dataclass(frozen=True, slots=True)
class Trains:
    """A process is in round `round`, after `step` completed steps."""

    slot: int
    pid: int
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Hurt:
    """A collective of round `round` failed in a process."""

    slot: int
    pid: int
    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Hung:
    """A process has been in step `step` for too long, and the others wait for it."""

    slot: int
    pid: int
    why: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class Stuck:
    """All processes of the round wait for each other in the same collective. `step`: the step they are in, or 0."""

    round: int
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The processes of the round called collectives that do not match. A retry would fail in the same way."""

    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Charged:
    """The job's count of charged failures; None: the store did not answer."""

    restarts: int | None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal asks the agent to stop. `enough`: as far as is known, the others could train on without it."""

    signal: int
    enough: bool = False


@dataclass(frozen=True, slots=True)
class Elapsed:
    """The time that a `Timer` asked for is over."""

    timer: Timer


Event = (
    Began | Formed | NotFormed | ProcessesFirst | Changed | Exited | Hello | Ready | Entered | Trains | Hurt | Hung
    | Stuck | Mismatched | Charged | StopRequested | Elapsed
)  # fmt: skip


# --- instructions


@dataclass(frozen=True, slots=True)
class JoinNext:
    """Ask for a round newer than `after`."""

    after: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Start a process in each of these slots, for `round`; without a round, the process gets ready for one."""

    slots: tuple[int, ...]
    round: Round | None


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell processes of a round. `whole`: the members of their present round still work together."""

    slots: tuple[int, ...]
    round: Round
    whole: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """The agent has left the round: tell its processes to end at the step after which the others change rounds."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signal:
    slots: tuple[int, ...]
    signal: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave the rendezvous, and end the agent with this exit code."""

    code: int
    why: str


class Purpose(Enum):
    HURT = auto()  # has the round ended in which a collective failed?
    COME = auto()  # are all processes in the round?
    GRACE = auto()  # have the processes ended that were asked to?
    NOTICE = auto()  # is it known who stays, when this agent is asked to stop?
    QUIET = auto()  # were others asked to stop meanwhile?
    LINGER = auto()  # have the other agents finished, too?
    AGAIN = auto()  # from now on, another Ctrl-C counts as a second one


@dataclass(frozen=True, slots=True)
class Timer:
    """Give the event `Elapsed` after so many seconds."""

    seconds: float
    purpose: Purpose
    round: int = 0
    why: str = ""


# A `MemberCommand` goes to the round store unchanged. `Changed` answers a `Drain`, and `Charged` a `Charge`.
MemberCommand = Stop | Drain | Withdraw | Break | Charge | Done | KeepProcesses | CloseJob
Instruction = JoinNext | Fork | Announce | Drained | Signal | Timer | Finish | MemberCommand
