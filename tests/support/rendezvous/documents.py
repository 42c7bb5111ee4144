"""Documents as the machine makes them, for tests that say what happened to a job."""

from __future__ import annotations

from typing import Any

from everstep.contract.document import Document, Member, Sizes
from everstep.membership.commands import Form, Join, Waited
from everstep.membership.machine import Rejected, apply


def agent(name: str, index: int = -1, **more: Any) -> Member:
    return Member(index, name, **more)


def after(document: Document, *events: Any) -> Document:
    """The document after the events, none of which may be refused."""
    for event in events:
        result = apply(document, event)
        assert isinstance(result, Document), f"{event}: {result}"
        document = result
    return document


def refused(document: Document, event: Any) -> Rejected:
    result = apply(document, event)
    assert isinstance(result, Rejected), f"{event} was not refused"
    return result


def joined(sizes: Sizes, *names: str) -> Document:
    return after(Document(sizes), *(Join(agent(name), sizes) for name in names))


def formed(sizes: Sizes, *names: str) -> Document:
    """Round 1 of these."""
    return after(joined(sizes, *names), Form(names[0], 0, Waited.LAST_CALL))


def names(document: Document) -> list[str]:
    return [member.agent for member in document.members]


TWO_OR_THREE = Sizes(2, 3)
