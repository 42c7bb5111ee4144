"""The operator's own rules about a job's document, and the round that a plan reads from it. Pure.

It knows no agents and no store. Invariants that `require_lawful` keeps: a round's number only grows; its members never
change; a closed job stays closed. Only the operator begins a closed document anew, for another run of the job.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

from everstep.contract.document import FINISHED, MAX_MEMBERS, Document, JoinRequest, Sizes, encode
from everstep.membership.commands import Form, Join, Waited
from everstep.membership.machine import Rejected, apply, join_all
from everstep.membership.proposals import above, outcome, without_expired
from everstep_operator.round_view import RoundView
from everstep_operator.rounds.documents import RoundsRefused
from everstep_operator.rounds.watches import Urgency


def require_lawful(before: Document | None, after: Document) -> None:
    """Raises RoundsRefused."""
    if before is None:
        return
    if before.closed is not None:
        raise RoundsRefused(f"the job is closed: {before.closed}")
    if after.round < before.round:
        raise RoundsRefused(f"round {after.round} is over: round {before.round} was formed")
    if after.round == before.round and after.members != before.members:
        raise RoundsRefused(f"the members of round {before.round} cannot be changed, only lost")


def require_no_success(before: Document | None, after: Document) -> None:
    """For an agent whose pod was asked to stop: a program may then end with exit code 0 (ADR 0034). Raises
    RoundsRefused."""
    if not set(after.done) <= set(before.done if before is not None else ()):
        raise RoundsRefused("the pod was told to end before its processes had: their exit code 0 is no success")


def with_pinned_sizes(document: Document, sizes: Sizes, surge: int = 0) -> Document:
    """The document of a job that may have only these sizes from now on, whatever sizes its agents request, and in which
    `surge` agents are announced for the places of those that have to leave.

    It does not end the running round: members in excess leave, missing ones join.
    """
    return replace(document, sizes=sizes, ruled=True, surge=surge)


def renumbered(text: str, number: int) -> str:
    # Not through Document, which would lose the fields of a newer release.
    return json.dumps({**json.loads(text), "round": number}, separators=(",", ":"))


def with_sizes(text: str | None, document: Document | None, sizes: Sizes, surge: int) -> tuple[str, Document] | None:
    """The document, or a new one if there is none, with the sizes and the surge that apply from now on. None: it has
    them already, or no longer needs any."""
    before = Document(sizes) if document is None else document
    if before.closed is not None or (before.ruled and (before.sizes, before.surge) == (sizes, surge)):
        return None
    after = with_pinned_sizes(before, sizes, surge)
    written = json.loads(encode(after))
    fields = written if text is None else json.loads(text)
    set_here = {name: written[name] for name in ("sizes", "ruled", "surge")}
    return json.dumps({**fields, **set_here}, separators=(",", ":")), after


def begun_anew(document: Document | None, sizes: Sizes, after: int) -> tuple[str, Document] | None:
    """A document without rounds, in place of the one that was closed after round `after`; None if this is another.
    Rounds of the job go on with the next number that was never published."""
    if document is None or document.closed is None or document.round != after:
        return None
    return with_sizes(None, None, sizes, 0)


def corrected(text: str, document: Document, before: Document | None) -> tuple[str, Document]:
    """An agent's document with the right sizes and surge. The agent should not have changed them: it is of a release
    that does not know the mark for pinned sizes, or asks for others."""
    if before is None or not before.ruled:
        return text, document
    return with_sizes(text, document, before.sizes, before.surge) or (text, document)


def with_join_requests(
    text: str | None, document: Document | None, join_requests: Mapping[str, JoinRequest], waiting: Collection[str] = ()
) -> Document | None:
    """The document with all allowed join requests, as an agent that joins would write its own and the others'.

    `join_requests` are those of all present agents. A request from before the present round may be answered without its
    owner's knowledge. It counts only if its owner is `waiting`, as a new agent is, which knows of no round. None: there
    is nothing to write, or `text` has fields that this release does not know and would lose. In that case the agents,
    which may be newer, write by themselves.
    """
    if document is not None and document.closed is not None:
        return None
    begun = Document(Sizes(1, MAX_MEMBERS)) if document is None else document
    ports = {member.agent: member.store_port for member in begun.joining}  # as `proposals.is_written`
    wanted = [
        join_request for agent, join_request in sorted(join_requests.items())
        if (join_request.after >= begun.round or (agent in waiting and outcome(document, join_request) is None))
        and ports.get(agent) != join_request.member.store_port
    ]  # fmt: skip
    if not wanted or (document is not None and encode(document).decode() != text):
        return None
    if document is None:
        begun = Document(wanted[0].sizes, id=wanted[0].member.agent)
    cleared, _ = without_expired(above(begun, wanted), "", join_requests)
    joined, let_in = join_all(cleared, (Join(join_request.member, join_request.sizes) for join_request in wanted))
    if not let_in:
        return None  # each agent gets the reason when it writes its own request
    # Survivors themselves decide how long they wait for replacements.
    patient = any(join_request.patient for join_request in join_requests.values())
    formed = apply(joined, Form(let_in[0], joined.round, Waited.NOTHING, shrink=not patient))
    return joined if isinstance(formed, Rejected) else formed


def urgency(before: Document | None, after: Document | None) -> Urgency:
    """How soon watchers need to know of the change."""
    if before is None or after is None:
        return Urgency.NOW
    if (before.round, before.closed) != (after.round, after.closed):
        return Urgency.NOW
    if replace(before, joining=(), seats=after.seats, sizes=after.sizes) != replace(after, joining=()):
        return Urgency.SOON
    # A new waiter matters only to earlier waiters, except when it is the first current member to rejoin: that ends the
    # round.
    members = {member.agent for member in after.members}
    ended, ends = (any(m.agent in members for m in document.joining) for document in (before, after))
    return Urgency.SOON if ends and not ended else Urgency.LATER


def round_view(document: Document) -> RoundView:
    """The round, for a plan."""
    gone = {loss.agent for loss in document.gone} - set(document.done)
    return RoundView(
        round=document.round,
        members=tuple((m.index, m.incarnation) for m in document.members),
        gone=tuple(sorted(m.index for m in document.members if m.agent in gone)),
        joining=tuple(sorted(m.index for m in document.joining)),
        closed=document.closed,
        finished=document.closed == FINISHED,
        keeps=document.in_process,
        sizes=document.sizes if document.ruled else None,
        surge=document.surge,
    )
