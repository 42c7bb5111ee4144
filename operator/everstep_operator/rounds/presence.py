"""The agents of one job that are present, and the pod of each. Pure: `now` is an argument, in monotonic seconds.

Presence is only in the leader's memory. So a new leader waits for the agents that the document names: none of them
counts as expired before it had one lease's time to announce itself again. A replica that leads again, with no other
leader in between, keeps its former presences. Invariants: only the pod that announced a presence renews and withdraws
it; numbers and bytes are bounded, for a pod and for the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.contract.document import Document, JoinRequest, Member
from everstep.contract.rounds import MAX_PRESENT_BYTES, MAX_TTL
from everstep_operator.errors import RetryableError, TerminalError

MAX_PRESENT = 4096
MAX_OF_POD = 8  # agents that one pod has started one after the other; all but one are about to expire
LEASE = 3.0  # seconds; the default of an agent


class PresenceRefused(TerminalError):
    """The pod may not do this; the message is sent to it."""


class PresenceFull(RetryableError):
    """A bound is reached: later there may be room."""


@dataclass(frozen=True, slots=True)
class Worker:
    """The pod behind an agent."""

    pod_uid: str
    index: int
    incarnation: int

    def may_be(self, member: Member) -> bool:
        """Whether an agent of this pod can be that member; index -1: the agent was given no index."""
        return member.index < 0 or (member.index, member.incarnation) == (self.index, self.incarnation)


@dataclass(slots=True)
class _Presence:
    join_request: JoinRequest
    value: bytes
    ttl: float
    until: float
    pod_uid: str
    waits: bool = False  # for a round: it has requested one, and was in none since


class Presences:
    """`changes` grows with every change of a presence or its value; `expirations` with each presence that ended.

    `lease` is the longest requested lease, in seconds.
    """

    def __init__(self, expirations: int, now: float) -> None:
        self.expirations, self.changes = expirations, 0
        self._present: dict[str, _Presence] = {}
        self._of_pod: dict[str, set[str]] = {}
        self._bytes = 0
        self._earliest = float("inf")  # no presence ends before this; a renewal can only make it too early
        self._awaited: dict[str, Member] = {}
        self._document: Document | None = None
        self._began, self.lease = now, LEASE

    def __len__(self) -> int:
        return len(self._present)

    def await_members(self, document: Document | None, lease: float) -> None:
        """Wait for the agents of a document that this leader reads for the first time: they count as present meanwhile.

        `lease` is the lease that the job's agents requested from the former leader, in seconds.
        """
        self._document, self.lease = document, max(self.lease, min(lease, MAX_TTL))
        if document is not None:
            everyone = (*document.remaining(), *document.joining)
            self._awaited = {m.agent: m for m in everyone if m.agent not in self._present}
            self._earliest = min(self._earliest, self._began + self.lease)

    def resume(self, expirations: int, now: float) -> None:
        """The same replica leads again, with no other leader in between. No agent could renew, so each gets one more
        lease.

        Without this, a leader that lost its Lease for a moment under load would forget all agents.
        """
        self.expirations, self.changes, self._began = expirations, self.changes + 1, now
        for presence in self._present.values():
            presence.until = now + presence.ttl
        self._earliest = self._first_end()

    @property
    def earliest(self) -> float:
        """The earliest time at which a presence may end; infinite if there is none."""
        return self._earliest if self._present or self._awaited else float("inf")

    def announce(self, join_request: JoinRequest, value: bytes, ttl: float, worker: Worker, now: float) -> None:
        """Raises PresenceRefused, PresenceFull."""
        self.expire(now)
        agent = join_request.member.agent
        if not worker.may_be(join_request.member):
            raise PresenceRefused(
                f"worker {worker.index}, incarnation {worker.incarnation} announces worker {join_request.member.index},"
                f" incarnation {join_request.member.incarnation}"
            )
        old = self._present.get(agent)
        if old is not None and old.pod_uid != worker.pod_uid:
            raise PresenceRefused(f"{agent} belongs to another pod")
        size = self._bytes + len(value) - (len(old.value) if old is not None else 0)
        own = self._of_pod.get(worker.pod_uid, set())
        if old is None and (len(self._present) >= MAX_PRESENT or len(own) >= MAX_OF_POD):
            raise PresenceFull(f"{len(self._present)} agents are present, {len(own)} of them of this pod")
        if size > MAX_PRESENT_BYTES:
            raise PresenceFull(f"the agents' announcements have {self._bytes} bytes already")
        self._present[agent] = _Presence(join_request, value, ttl, now + ttl, worker.pod_uid)
        self._of_pod.setdefault(worker.pod_uid, set()).add(agent)
        self._bytes, self.changes = size, self.changes + 1
        self._awaited.pop(agent, None)
        self.lease = max(self.lease, ttl)  # all agents of a job have the same
        self._earliest = min(self._earliest, now + ttl)

    def wait_for_round(self, agent: str) -> None:
        """The agent has just announced itself, and waits for a round."""
        self._present[agent].waits = True

    def round_formed(self, document: Document | None) -> None:
        """The document has a new round: its members no longer wait for it or an older one."""
        for member in document.members if document is not None else ():
            presence = self._present.get(member.agent)
            if presence is not None and document is not None and presence.join_request.after < document.round:
                presence.waits = False

    @property
    def waiting(self) -> frozenset[str]:
        """The agents that wait for a round, as far as is known."""
        return frozenset(agent for agent, presence in self._present.items() if presence.waits)

    def renew(self, agent: str, worker: Worker, now: float) -> bool:
        """False if it has expired. Raises PresenceRefused."""
        self.expire(now)
        presence = self._owned(agent, worker)
        if presence is None:
            return False
        presence.until = now + presence.ttl
        return True

    def withdraw(self, agent: str, worker: Worker) -> None:
        """End the agent's presence now, if there is one. Raises PresenceRefused."""
        awaited = self._awaited.get(agent)
        if self._owned(agent, worker) is not None or (awaited is not None and worker.may_be(awaited)):
            self._end([agent])

    def withdraw_pod(self, worker: Worker) -> bool:
        """The pod is dead: end the presences of its agents. Whether there were any."""
        agents = self._of_pod.get(worker.pod_uid, set()) | {
            agent
            for agent, m in self._awaited.items()
            if (m.index, m.incarnation) == (worker.index, worker.incarnation)
        }
        self._end(sorted(agents))
        return bool(agents)

    def expire(self, now: float) -> bool:
        """End expired presences; whether there were any."""
        if now < self._earliest:
            return False
        ended = [agent for agent, presence in self._present.items() if presence.until <= now]
        if self._began + self.lease <= now:
            ended += self._awaited
        self._end(ended)
        self._earliest = self._first_end()
        return bool(ended)

    def present(self, now: float) -> dict[str, str]:
        """Each agent's announcement. An awaited agent is present too, with a join request that was answered already."""
        self.expire(now)
        announced = {agent: presence.value.decode() for agent, presence in self._present.items()}
        return {
            **announced,
            **{agent: join_request.encode().decode() for agent, join_request in self._answered_requests().items()},
        }

    def answers(self, pod_uid: str, now: float) -> bool:
        """Whether an agent of this pod renews its presence. Before one lease's time every pod may have one, because
        agents announce themselves to a new leader again."""
        self.expire(now)
        return pod_uid in self._of_pod or now < self._began + self.lease

    def join_requests(self, now: float) -> dict[str, JoinRequest]:
        """Each agent's join request: `present`, decoded."""
        self.expire(now)
        return {
            **{agent: presence.join_request for agent, presence in self._present.items()},
            **self._answered_requests(),
        }

    def _first_end(self) -> float:
        ends = [presence.until for presence in self._present.values()]
        if self._awaited:
            ends.append(self._began + self.lease)
        return min(ends, default=float("inf"))

    def _answered_requests(self) -> dict[str, JoinRequest]:
        """The join requests of awaited agents, which an earlier round has answered."""
        if self._document is None:
            return {}
        after = max(0, self._document.round - 1)
        return {agent: JoinRequest(member, after, self._document.sizes) for agent, member in self._awaited.items()}

    def _owned(self, agent: str, worker: Worker) -> _Presence | None:
        presence = self._present.get(agent)
        if presence is not None and presence.pod_uid != worker.pod_uid:
            raise PresenceRefused(f"{agent} belongs to another pod")
        return presence

    def _end(self, agents: Iterable[str]) -> None:
        for agent in agents:
            presence = self._present.pop(agent, None)
            if presence is not None:
                self._bytes -= len(presence.value)
                own = self._of_pod[presence.pod_uid]
                own.discard(agent)
                if not own:
                    del self._of_pod[presence.pod_uid]
            if presence is not None or self._awaited.pop(agent, None) is not None:
                self.expirations, self.changes = self.expirations + 1, self.changes + 1
