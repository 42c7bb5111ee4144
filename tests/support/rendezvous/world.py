"""A simulated job: agents that act on what they last saw, a store, and the oracle that judges every document.

Each method makes at most one store call, so any order of methods is an interleaving, and an agent that is not chosen
again has crashed at that point. The agents decide with `proposals` and `machine` as shipped; the oracle keeps its own
books.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from everstep.contract.document import FINISHED, LEFT, Document, JoinRequest, Member, Sizes, decode, encode
from everstep.membership import machine, proposals, world_state
from everstep.membership.commands import Command, Drain, Evict, Leave, Reach, Stop, Waited, Withdraw
from everstep.membership.machine import Rejected
from everstep.membership.proposals import Admitted, Proposal
from everstep.membership.world_state import Round
from everstep_operator.rounds.rules import with_join_requests, with_pinned_sizes

MOST_AGENTS = 8
TURNS = 60  # in which a world without faults must come to rest


class Violation(AssertionError):
    """What must never happen, or what should have happened by now."""


@dataclass
class Agent:
    join_request: JoinRequest
    alive: bool = True
    seen: tuple[int, Document | None] = (0, None)  # version and document of its last look, old as it may be
    present: dict[str, JoinRequest] = field(default_factory=dict)
    round: Round | None = None
    barred: bool = False
    left: bool = False

    @property
    def name(self) -> str:
        return self.join_request.member.agent


class World:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.agents: dict[str, Agent] = {}
        self.presence: dict[str, JoinRequest] = {}
        self.waiting: set[str] = set()  # has asked the operator for a round, which has not seen it in one since
        self.history: list[tuple[int, Document | None]] = [(0, None)]
        self.formed: dict[int, tuple[Member, ...]] = {}
        self.evicted: dict[int, set[str]] = {}
        self.severed: set[frozenset[str]] = set()  # reported pairs
        self.asked: set[str] = set()  # to stop
        self.stopped: set[str] = set()  # and out since
        self.log: list[str] = []
        self.written_for = 0.0  # how often, of 1, an operator writes; a store without one never does

    @property
    def document(self) -> Document | None:
        return self.history[-1][1]

    # --- what an agent does

    def start(self, index: int, incarnation: int) -> None:
        """A new life of a worker; index -1: any."""
        if len(self.agents) >= MOST_AGENTS:
            return
        name = f"agent-{len(self.agents)}"
        self.agents[name] = Agent(JoinRequest(Member(index, name, incarnation), 0, self.sizes))

    def announce(self, agent: Agent) -> None:
        self.presence[agent.name] = agent.join_request
        if agent.round is None:
            self.waiting.add(agent.name)

    def look(self, agent: Agent, age: int) -> None:
        """See the document as it was `age` versions ago."""
        agent.seen = self.history[max(0, len(self.history) - 1 - age)]
        self._settled(agent)

    def _settled(self, agent: Agent) -> None:
        if agent.round is None:
            match proposals.outcome(agent.seen[1], agent.join_request):
                case Admitted(found):
                    agent.round = found
                    if self.formed.get(found.number) != found.members:
                        raise Violation(f"{agent.name} believes in another round {found.number}: {found.members}")

    def read_presence(self, agent: Agent) -> None:
        agent.present = dict(self.presence)

    def join(self, agent: Agent, waited: Waited, answer_lost: bool, shrink: bool) -> None:
        """Write what it would, on what it saw, however old that is."""
        if agent.round is not None or agent.barred or agent.left:
            return
        self._settled(agent)
        if agent.round is not None:
            return
        version, document = agent.seen
        match proposals.propose_join(document, agent.join_request, agent.present, waited, shrink=shrink):
            case Proposal(after, reasons):
                why = f"{agent.name}: {'; '.join(reasons)}"
                if self._swap(version, after, why, set(agent.present)) and not answer_lost:
                    agent.seen = self.history[-1]
            case proposals.Barred(_):
                agent.barred = True

    def again(self, agent: Agent) -> None:
        """Ask for the next round."""
        if agent.round is not None:
            agent.join_request = replace(agent.join_request, after=agent.round.number)
            agent.round = None

    def act(self, agent: Agent, event: Command) -> None:
        """Change the document that it saw by an event."""
        version, document = agent.seen
        if document is None:
            return
        after = machine.apply(document, event)
        if isinstance(after, Rejected) or not self._swap(version, after, f"{agent.name}: {event}"):
            return
        agent.seen = self.history[-1]
        match event:
            case Evict(agent=target):
                self.evicted.setdefault(document.round, set()).add(target)
                self._assert_out(target)
            case Withdraw(by=target):
                self.evicted.setdefault(document.round, set()).add(target)
                self._assert_out(target)
            case Stop(agent=target):
                self.asked.add(target)
            case Drain():
                _, written = agent.seen
                assert written is not None
                leavers = {loss.agent for loss in written.gone} - {loss.agent for loss in document.gone}
                self.evicted.setdefault(document.round, set()).update(leavers)
                for target in leavers:
                    self._assert_out(target)
            case Leave(agent=target):
                self.agents[target].left = True
                self.evicted.setdefault(document.round, set()).add(target)
                self._assert_out(target)
            case Reach(by=by, target=target, reaches=reaches):
                pair = frozenset((by, target))
                self.severed = self.severed - {pair} if reaches else self.severed | {pair}

    def stray(self, agent: Agent, event: Command, number: int) -> None:
        """An event decided in round `number` meets the present document: from outside, or late, it must be refused."""
        document = self.document
        if document is None or document.closed is not None:
            return
        outside = agent.name not in {m.agent for m in (*document.members, *document.joining)}
        fenced = agent.name in self.evicted.get(document.round, set()) and all(
            m.agent != agent.name for m in document.joining
        )
        if (outside or fenced or number != document.round) and not isinstance(machine.apply(document, event), Rejected):
            raise Violation(f"{agent.name} did {event} in round {document.round}")

    # --- what the operator does

    def write_join_requests(self, age: int) -> None:
        """As an operator that holds the document of `age` versions ago, and knows who is present."""
        version, document = self.history[max(0, len(self.history) - 1 - age)]
        text = None if document is None else encode(document).decode()
        after = with_join_requests(text, document, self.presence, self.waiting & self.presence.keys())
        if after is not None:
            self._swap(version, after, "operator", set(self.presence))

    def rule(self, sizes: Sizes) -> None:
        """Sizes that hold from now on, though the agents were started with others."""
        document = self.document or Document(sizes)
        if document.closed is None:
            self._swap(self.history[-1][0], with_pinned_sizes(document, sizes), f"sizes {sizes}")

    # --- what happens to agents

    def crash(self, agent: Agent) -> None:
        agent.alive = False

    def expire(self, agent: Agent) -> None:
        self.presence.pop(agent.name, None)
        self.waiting.discard(agent.name)

    # --- the oracle

    def _swap(self, expected: int, after: Document, why: str, present: set[str] | None = None) -> bool:
        version, before = self.history[-1]
        if expected != version:
            return False
        self.log.append(f"{version + 1} {why}")
        self._judge(before, after, set(self.agents) if present is None else present)
        self.history.append((version + 1, after))
        self.waiting -= {
            m.agent for m in after.members if m.agent in self.presence and self.presence[m.agent].after < after.round
        }
        return True

    def _assert_out(self, target: str) -> None:
        document = self.document
        assert document is not None
        if target in {m.agent for m in (*document.remaining(), *document.joining)}:
            raise Violation(f"{target} was taken out and is still in")

    def _judge(self, before: Document | None, after: Document, present: set[str]) -> None:
        if decode(encode(after)) != after:
            raise Violation("a document is not what its bytes say")
        if before is not None and before.closed is not None:
            raise Violation("a closed job was changed")
        here = [*after.joining, *(m for m in after.remaining() if m.agent not in {j.agent for j in after.joining})]
        if len({m.index for m in here}) != len(here):
            raise Violation(f"two agents are the same worker: {here}")
        if after.closed == FINISHED and {m.agent for m in after.members} != set(after.done):
            raise Violation(f"finished, and only {after.done} are done")
        if sum(s.charged for s in after.history) > after.restarts:
            raise Violation(f"{after.restarts} restarts were counted, and charged were {after.history}")
        self._judge_stopping(before, after)
        number = 0 if before is None else before.round
        if after.round not in (number, number + 1):
            raise Violation(f"round {number} was followed by {after.round}")
        if after.round == number:
            if before is not None and (after.members != before.members or not set(before.gone) <= set(after.gone)):
                raise Violation(f"round {number} has other members than it had")
            return
        self._judge_round(before, after, present)

    def _judge_stopping(self, before: Document | None, after: Document) -> None:
        here = {m.agent for m in (*after.remaining(), *after.joining)}
        if back := self.stopped & here:
            raise Violation(f"{back} were asked to stop, were out, and are back")
        if before is None:
            return
        self.stopped |= self.asked - here
        asked = set(after.stopping) - set(before.stopping)
        if asked and after != replace(before, stopping=(*before.stopping, *asked)):
            raise Violation(f"that {asked} are asked to stop changed more than that")
        if after.round == before.round:
            left = {loss.agent for loss in after.gone if loss.why == LEFT} - {loss.agent for loss in before.gone}
            stay = [m for m in after.remaining() if m.agent not in after.stopping]
            here = {m.agent for m in after.members}
            wait = [m for m in after.joining if m.agent not in {*here, *after.stopping}]
            if left and (not left <= set(after.stopping) or not stay or not after.sizes.largest(len([*stay, *wait]))):
                raise Violation(f"{left} left, and {stay} stayed")
        elif {m.agent for m in after.members} <= set(after.stopping) - {m.agent for m in before.remaining()}:
            raise Violation(f"a round of agents that only stop: {after.members}")

    def _judge_round(self, before: Document | None, after: Document, present: set[str]) -> None:
        names = [m.agent for m in after.members]
        if after.round in self.formed:
            raise Violation(f"round {after.round} was formed twice")
        self.formed[after.round] = after.members
        if len(names) != after.sizes.largest(len(names)) or len(set(names)) != len(names):
            raise Violation(f"a round of {names} with sizes {after.sizes}")
        for name in names:
            agent = self.agents[name]
            if agent.join_request.after >= after.round or agent.barred:
                raise Violation(f"{name} did not ask for round {after.round}")
            if agent.round is not None and agent.round.number >= after.round - 1 and agent.alive:
                raise Violation(f"{name} holds round {agent.round.number} and is in {after.round} unasked")
        for pair in self.severed:
            if pair <= set(names):
                raise Violation(f"{sorted(pair)} do not reach each other")
        for member in after.members:
            asked = self.agents[member.agent].join_request.member
            rivals = [
                a.join_request.member for a in self.agents.values() if a.join_request.member.index == asked.index >= 0
            ]
            joined = [r.incarnation for r in rivals if any(self._was_here(r.agent, d) for _, d in self.history)]
            if asked.index >= 0 and joined and asked.incarnation < max(joined):
                raise Violation(f"{member.agent} was replaced by a newer incarnation")
        if before is not None:
            self._judge_against(before, after, present)
            if not self.severed:
                self._judge_groups(before, after)

    @staticmethod
    def _was_here(name: str, document: Document | None) -> bool:
        return document is not None and any(m.agent == name for m in (*document.members, *document.joining))

    @staticmethod
    def _judge_against(before: Document, after: Document, present: set[str]) -> None:
        old = [m.agent for m in before.members]
        new = [m.agent for m in after.members]
        kept = [name for name in new if name in old]
        grouped = after.sizes.group > 1  # then survivors keep their place in a group, and not their order
        if not grouped and kept != [name for name in old if name in kept]:
            raise Violation(f"survivors changed their order: {old} {kept}")
        for rank, name in enumerate(old):
            # Room for everyone behind it: then there is no reason to move.
            behind = 0 if grouped else sum(other in new for other in old[rank + 1 :])
            if name in new and rank < len(new) - behind and new[rank] != name:
                raise Violation(f"{name} lost rank {rank} for nothing: {old} {new}")
        # Not by itself over: nobody was lost before or in this swap, and none of its members asked for another.
        waiting = {m.agent for m in before.joining}
        holders = {seat.agent for seat in after.seats}
        whole = (
            not before.gone
            and before.broken is None
            and all(m.agent in present and m.agent in holders for m in before.members)
        )
        if before.members and whole and not any(m.agent in waiting or m.agent in new for m in before.members):
            raise Violation(f"round {before.round} was ended by who waited: {old} {new}")

    @staticmethod
    def _judge_groups(before: Document, after: Document) -> None:
        """Who has all its partners is not left out for one that has not; as many as can keep their place in a group."""
        group = after.sizes.group
        old, new = [m.agent for m in before.members], [m.agent for m in after.members]
        asked = {m.agent for m in (*after.members, *after.joining)} - set(after.stopping)
        remain = {m.agent for m in before.remaining()}
        groups = [old[i : i + group] for i in range(0, len(old), group)]
        inside = {name for part in groups if len(part) == group and set(part) <= asked & remain for name in part}
        if inside - set(new) and not set(new) <= inside:
            raise Violation(f"{inside - set(new)} were left out of {new} though they have their partners: {old}")
        for place in range(group):
            held = set(old[place::group]) & set(new)
            if len(held & set(new[place::group])) < min(len(held), len(new) // group):
                raise Violation(f"{held} had place {place} of {group}, and more could have it still: {old} {new}")

    # --- and then no more faults

    def settle(self) -> None:
        """Everyone alive does what it should, in turn; the world must come to rest. Raises Violation."""
        if self.document is not None and self.document.ruled:
            self.rule(Sizes(1, MOST_AGENTS))  # nobody is taken away here who is too many
        for agent in self.agents.values():
            if not agent.alive or agent.left or agent.barred:
                self.expire(agent)
            elif agent.name in self.asked:
                self.look(agent, 0)
                self.act(agent, Leave(agent.name))
                agent.left = True
                self.expire(agent)
            else:
                self.announce(agent)
        for turn in range(TURNS):
            changed = len(self.history)
            for agent in list(self.agents.values()):
                if agent.alive and not agent.left and not agent.barred:
                    self._turn(agent, Waited(min(turn // 8, 2)) if turn % 8 == 7 else Waited.NOTHING)
            if len(self.history) == changed and turn % 8 == 7 and turn > 24:
                break
        else:
            raise Violation("the world does not come to rest")
        self._judge_rest()

    def _turn(self, agent: Agent, waited: Waited) -> None:
        self.look(agent, 0)
        if agent.round is not None:
            document = self.document
            now = world_state.world_state(document, agent.round.number, agent.name)
            if isinstance(now, world_state.Closed):
                return
            if isinstance(now, world_state.Whole | world_state.Finishing):
                assert document is not None
                after, reasons = proposals.without_expired(document, agent.name, self.presence)
                if reasons:
                    self._swap(self.history[-1][0], after, f"{agent.name}: {reasons}")
                return
            self.again(agent)
            self.announce(agent)
        self.read_presence(agent)
        self.join(agent, waited, False, waited is not Waited.NOTHING)
        self.look(agent, 0)

    def _judge_rest(self) -> None:
        document = self.document
        able = [a for a in self.agents.values() if a.alive and not a.left and not a.barred]
        if document is None or document.closed is not None or not able:
            return
        inside = [a for a in able if a.round is not None]
        size = document.sizes.largest(len(able))
        if size and not self.severed and len(inside) != size:
            raise Violation(f"{len(able)} agents are able and {len(inside)} of {size} train")
        for agent in inside:
            assert agent.round is not None
            if agent.round.number != document.round:
                raise Violation(f"{agent.name} stayed in round {agent.round.number} of {document.round}")
        names = {m.agent for m in document.members if m in document.remaining() or m.agent not in document.done}
        if inside and names != {a.name for a in inside}:
            raise Violation(f"round {document.round} has members {names}, and {inside} believe to be in it")
