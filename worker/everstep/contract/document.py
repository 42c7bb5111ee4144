"""The document that a job's agents agree on, and its bytes: what workers write and the operator keeps and reads.

Pure. Knows neither who reads it nor how it changes (`everstep.membership.machine`). Invariants: what `encode` writes,
`decode` reads back equal; every text, list and the whole have a bound; there is no time in it, because agents' clocks
differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from everstep.contract.fields import (
    MAX_AGENT,
    agent_name,
    each,
    flag,
    number,
    parse_object,
    short,
    text,
    whole,
)
from everstep.contract.fields import DocumentInvalid as DocumentInvalid  # noqa: PLC0414 - who reads one meets it here
from everstep.contract.fields import RendezvousFailed as RendezvousFailed  # noqa: PLC0414

VERSION = 1
MAX_MEMBERS = 4096
MAX_BYTES = 1024 * 1024  # etcd takes requests of 1.5 MiB
MAX_ADDRESS = 255
MAX_REASON = 200
MAX_REPORTS = 1024
MAX_HISTORY = 16
MAX_STOPPING = MAX_MEMBERS
FINISHED = "finished: all members' processes have succeeded"  # why a job that has succeeded is closed
LEFT = "it was asked to stop, and leaves at the end of a step"  # why a member is gone that nobody lost
PAST_AGENTS = 8  # remembered a seat: more lives of one pod than that, and a very old one could come back
MAX_INDEX = 2**16


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One agent that asks to train: `agent` is unique to this life of its process.

    `index` is the worker's (-1: give me a free one), `incarnation` how often that worker was recreated. `store_port` is
    where this agent's process-group store listens, `link_port` where it answers its peers (0: nowhere).
    """

    index: int
    agent: str
    incarnation: int = 0
    local_world_size: int = 1
    address: str = ""
    store_port: int = 0
    link_port: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The world sizes, in agents, that a round may have: `allowed`, or all from `minimum` to `maximum`."""

    minimum: int
    maximum: int
    allowed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum <= MAX_MEMBERS:
            raise DocumentInvalid(
                f"sizes {self.minimum}:{self.maximum}: 1 <= minimum <= maximum <= {MAX_MEMBERS} is expected"
            )
        if any(not self.minimum <= size <= self.maximum for size in self.allowed) or (
            list(self.allowed) != sorted(set(self.allowed))
        ):
            raise DocumentInvalid(
                f"allowed sizes {self.allowed}: increasing numbers from {self.minimum} to {self.maximum} are expected"
            )

    def largest(self, available: int) -> int:
        """The largest size that `available` agents can make; 0 if none."""
        if self.allowed:
            return max((size for size in self.allowed if size <= available), default=0)
        size = min(available, self.maximum)
        return size if size >= self.minimum else 0

    @property
    def group(self) -> int:
        """The greatest common divisor of all sizes: that many agents may hold one replica of a sharded model."""
        return math.gcd(*self.allowed) or 1

    def __str__(self) -> str:
        return ",".join(map(str, self.allowed)) or f"{self.minimum}:{self.maximum}"


@dataclass(frozen=True, slots=True)
class Seat:
    """The newest holder of a worker index, and the agents that it replaced: these never come back."""

    index: int
    agent: str
    incarnation: int
    past: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loss:
    """A member of the present round that is no longer in it."""

    agent: str
    why: str


@dataclass(frozen=True, slots=True)
class Setback:
    """The reason for the end of a round, and whether the job's restart budget was charged for it."""

    round: int
    agent: str
    why: str
    charged: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Two agents, one of which did not reach the other. `active` until it does; `times`: how often that began."""

    low: str
    high: str
    active: bool
    times: int


@dataclass(frozen=True, slots=True)
class Document:
    """The document on which agents agree. `members` are in rank order; `joining` wait for the round after `round`.

    `id` is the agent that began the document, or "" if the operator did, which never gives a round's number twice. A
    store that lost its document gets another, with rounds of its own; agents are unique, so it has another id.
    `floor`: the next round's number is above it; agents that were in a document before this one know that round.
    """

    sizes: Sizes
    id: str = ""
    floor: int = 0
    round: int = 0
    members: tuple[Member, ...] = ()
    gone: tuple[Loss, ...] = ()
    joining: tuple[Member, ...] = ()
    seats: tuple[Seat, ...] = ()
    reports: tuple[Report, ...] = ()
    broken: str | None = None  # why the present round is over, though its members may all live
    boundary: int | None = None  # the step after which the members let joiners in
    done: tuple[str, ...] = ()  # members whose processes have all succeeded
    stopping: tuple[str, ...] = ()  # agents that are asked to stop; who of them is out does not come back
    in_process: bool = False  # the job's processes keep their memory from round to round
    ruled: bool = False  # the sizes are those of who publishes the job: what agents were started with does not count
    surge: int = 0  # how many agents who publishes the job creates for the places of those that have to leave
    restarts: int = 0  # charged, of the whole job
    history: tuple[Setback, ...] = ()  # the newest setbacks, oldest first
    closed: str | None = None

    def remaining(self) -> tuple[Member, ...]:
        """The members of the present round that are not gone from it, in rank order."""
        gone = {loss.agent for loss in self.gone}
        return tuple(member for member in self.members if member.agent not in gone)


def encode(document: Document) -> bytes:
    """Compact JSON. Raises DocumentInvalid if it is larger than a store takes."""
    body: dict[str, Any] = {
        "version": VERSION,
        "id": document.id,
        "floor": document.floor,
        "sizes": _sizes_row(document.sizes),
        "round": document.round,
        "members": [member_row(member) for member in document.members],
        "gone": [[loss.agent, loss.why] for loss in document.gone],
        "joining": [member_row(member) for member in document.joining],
        "seats": [[seat.index, seat.agent, seat.incarnation, list(seat.past)] for seat in document.seats],
        "reports": [[r.low, r.high, r.active, r.times] for r in document.reports],
        "broken": document.broken,
        "boundary": document.boundary,
        "done": list(document.done),
        "stopping": list(document.stopping),
        "in_process": document.in_process,
        "ruled": document.ruled,
        "surge": document.surge,
        "restarts": document.restarts,
        "history": [[s.round, s.agent, s.why, s.charged] for s in document.history],
        "closed": document.closed,
    }
    data = json.dumps(body, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise DocumentInvalid(f"the document would have {len(data)} bytes, at most {MAX_BYTES} fit into a store")
    return data


def decode(data: bytes) -> Document:
    """Read a document. Raises DocumentInvalid, naming the first field that is wrong."""
    return whole(decoding(data))


def decoding(data: bytes) -> Generator[None, None, Document]:
    """`decode` in pieces: other work may be done whenever it yields. JSON is one piece, then `PIECE` rows."""
    body = parse_object(data, MAX_BYTES)
    if (version := body.get("version")) != VERSION:
        raise DocumentInvalid(
            f"version: {short(version)} is not {VERSION}: agents of different releases share one job; use one"
        )
    yield
    broken, boundary, closed = body.get("broken"), body.get("boundary"), body.get("closed")
    document = Document(
        sizes=_read_sizes(body.get("sizes"), "sizes", "sizes"),
        id=text(body.get("id"), "id", MAX_AGENT),
        floor=number(body.get("floor"), "floor"),
        round=number(body.get("round"), "round"),
        members=(yield from each(body.get("members"), "members", MAX_MEMBERS, read_member)),
        gone=(yield from each(body.get("gone"), "gone", MAX_MEMBERS, _loss)),
        joining=(yield from each(body.get("joining"), "joining", MAX_MEMBERS, read_member)),
        seats=(yield from each(body.get("seats"), "seats", MAX_MEMBERS, _seat)),
        reports=(yield from each(body.get("reports"), "reports", MAX_REPORTS, _report)),
        broken=None if broken is None else text(broken, "broken", MAX_REASON),
        boundary=None if boundary is None else number(boundary, "boundary"),
        done=(yield from each(body.get("done"), "done", MAX_MEMBERS, agent_name)),
        stopping=(yield from each(body.get("stopping"), "stopping", MAX_STOPPING, agent_name)),
        in_process=flag(body.get("in_process"), "in_process"),
        ruled=flag(body.get("ruled"), "ruled"),
        surge=number(body.get("surge"), "surge", MAX_MEMBERS + 1),
        restarts=number(body.get("restarts"), "restarts"),
        history=(yield from each(body.get("history"), "history", MAX_HISTORY, _setback)),
        closed=None if closed is None else text(closed, "closed", MAX_REASON),
    )
    _check_unique("members", [m.agent for m in document.members])
    _check_unique("joining", [m.agent for m in document.joining])
    _check_unique("seats", [str(s.index) for s in document.seats])
    return document


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The value of an agent's presence: the member, and that it asks for a round newer than `after`. `patient`:
    survivors wait for replacements, and decide for how long.
    """

    member: Member
    after: int
    sizes: Sizes = field(default=Sizes(1, MAX_MEMBERS))
    patient: bool = False

    def encode(self) -> bytes:
        body = [member_row(self.member), self.after, _sizes_row(self.sizes)]
        request = {"version": VERSION, "join": body, "patient": self.patient}
        return json.dumps(request, separators=(",", ":")).encode()


def decode_join_request(data: bytes) -> JoinRequest:
    """Read a presence's value. Raises DocumentInvalid."""
    body = parse_object(data, 64 * 1024)
    join_request = body.get("join")
    if body.get("version") != VERSION or not isinstance(join_request, list) or len(join_request) != 3:
        raise DocumentInvalid(f"presence: {short(body)} is not a join request of version {VERSION}")
    sizes = _read_sizes(join_request[2], "presence.sizes", "presence")
    return JoinRequest(
        member=read_member(join_request[0], "presence.member"),
        after=number(join_request[1], "presence.after"),
        sizes=sizes,
        patient=flag(body.get("patient"), "presence.patient"),
    )


def member_row(member: Member) -> list[Any]:
    """A member as a list: a third of the bytes of an object with names, and a document holds thousands."""
    return [
        member.index, member.agent, member.incarnation, member.local_world_size, member.address, member.store_port,
        member.link_port,
    ]  # fmt: skip


def read_member(row: object, name: str) -> Member:
    if not isinstance(row, list) or len(row) != 7:
        raise DocumentInvalid(f"{name}: {short(row)} is not a member")
    index = row[0]
    return Member(
        index=-1 if index == -1 and type(index) is int else number(index, f"{name}.index", MAX_INDEX),
        agent=agent_name(row[1], f"{name}.agent"),
        incarnation=number(row[2], f"{name}.incarnation"),
        local_world_size=number(row[3], f"{name}.local_world_size", MAX_INDEX, low=1),
        address=text(row[4], f"{name}.address", MAX_ADDRESS),
        store_port=number(row[5], f"{name}.store_port", 2**16),
        link_port=number(row[6], f"{name}.link_port", 2**16),
    )


def _sizes_row(sizes: Sizes) -> list[Any]:
    return [sizes.minimum, sizes.maximum, list(sizes.allowed)]


def _read_sizes(row: object, name: str, within: str) -> Sizes:
    """`within` is what its fields are named after in an error."""
    if not isinstance(row, list) or len(row) != 3:
        raise DocumentInvalid(f"{name}: {short(row)} is not [minimum, maximum, allowed]")
    return Sizes(
        number(row[0], f"{within}.minimum"),
        number(row[1], f"{within}.maximum"),
        whole(each(row[2], f"{within}.allowed", MAX_MEMBERS, number)),
    )


def _loss(row: object, name: str) -> Loss:
    if not isinstance(row, list) or len(row) != 2:
        raise DocumentInvalid(f"{name}: {short(row)} is not [agent, why]")
    return Loss(agent_name(row[0], f"{name}.agent"), text(row[1], f"{name}.why", MAX_REASON))


def _setback(row: object, name: str) -> Setback:
    if not isinstance(row, list) or len(row) != 4:
        raise DocumentInvalid(f"{name}: {short(row)} is not [round, agent, why, charged]")
    return Setback(
        number(row[0], f"{name}.round"),
        agent_name(row[1], f"{name}.agent"),
        text(row[2], f"{name}.why", MAX_REASON),
        flag(row[3], f"{name}.charged"),
    )


def _seat(row: object, name: str) -> Seat:
    if not isinstance(row, list) or len(row) != 4:
        raise DocumentInvalid(f"{name}: {short(row)} is not [index, agent, incarnation, past]")
    return Seat(
        number(row[0], f"{name}.index", MAX_INDEX),
        agent_name(row[1], f"{name}.agent"),
        number(row[2], f"{name}.incarnation"),
        whole(each(row[3], f"{name}.past", PAST_AGENTS, agent_name)),
    )


def _report(row: object, name: str) -> Report:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[2], bool):
        raise DocumentInvalid(f"{name}: {short(row)} is not [agent, agent, active, times]")
    return Report(agent_name(row[0], name), agent_name(row[1], name), row[2], number(row[3], f"{name}.times"))


def _check_unique(name: str, keys: list[str]) -> None:
    if len(set(keys)) != len(keys):
        raise DocumentInvalid(f"{name}: the same agent or index twice")
