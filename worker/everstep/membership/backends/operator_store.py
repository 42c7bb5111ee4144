"""A round store in the operator, over HTTP; `everstep.contract.rounds` describes the protocol.

The pod's token names the job. One thread waits at the operator for changes; callers of `watch` wait for that thread.
Invariant: a view never goes back, in whatever order answers arrive, and whatever a new leader of the operator has
counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.contract.document import MAX_BYTES
from everstep.contract.rounds import (
    DOCUMENT_PATH,
    EXPIRATIONS_HEADER,
    EXPIRATIONS_PARAMETER,
    GRACE_HEADER,
    MAX_PRESENT_BYTES,
    PRESENCE_PATH,
    TTL_HEADER,
    VERSION_HEADER,
)
from everstep.membership.backends.operator_calls import OperatorCalls, Reply
from everstep.membership.backends.watching import Watching
from everstep.membership.errors import StoreUnavailable
from everstep.membership.store import View

WAIT = 20.0  # seconds that one watch request waits at the operator
MAX_GRACE = 30.0  # seconds that an agent lets the operator take to write its join request, at most
NOTHING_COUNTED = -1


@dataclass(frozen=True, slots=True)
class Known:
    """The view at one moment, and the operator's count of expirations then."""

    view: View | None
    counted: int


class HttpStore(Watching):
    """One job's round store."""

    def __init__(self, calls: OperatorCalls) -> None:
        super().__init__()
        self._calls = calls
        self._counted = NOTHING_COUNTED  # the operator's count of expirations; another leader may begin anew

    def read(self) -> View:
        known = self._known()
        return self._merge(self._look(_path(known)), known)

    def compare_and_swap(self, expected: int, document: bytes) -> int | None:
        reply = self._calls.call(
            "PUT", DOCUMENT_PATH, expect=(204, 412), body=document, headers={VERSION_HEADER: str(expected)}
        )
        if reply.status == 412:
            return None
        version = _number(reply, VERSION_HEADER)
        with self._changed:
            self._merge(View(document, version, self._counted), self._known())
        return version

    def announce(self, agent: str, value: bytes, ttl: float) -> float:
        known = self._known()
        reply = self._calls.call(
            "PUT", _presence(agent), expect=(200, 204), body=value, headers={TTL_HEADER: f"{ttl:g}"}, limit=MAX_BYTES
        )
        grace = _grace(reply)
        if grace:
            self._merge(_seen(reply), known)
        return grace

    def renew(self, agent: str) -> bool:
        return self._calls.call("POST", _presence(agent), expect=(204, 410), hedged=True).status == 204

    def withdraw(self, agent: str) -> None:
        self._calls.call("DELETE", _presence(agent), expect=(204,))

    def present(self) -> Mapping[str, bytes]:
        reply = self._calls.call("GET", PRESENCE_PATH, expect=(200,), limit=2 * MAX_PRESENT_BYTES)
        try:
            presence = json.loads(reply.data)
        except (ValueError, RecursionError) as e:
            raise StoreUnavailable(f"the operator's list of agents cannot be read: {e}") from e
        # An agent that is missing in the list counts as expired. So the answer must be a well-formed list.
        if not isinstance(presence, dict) or any(not (isinstance(v, str) and v[:1] == "{") for v in presence.values()):
            raise StoreUnavailable("what answers for the operator gives no list of agents")
        return {agent: value.encode() for agent, value in presence.items()}

    # --- inside

    def _look(self, path: str, reply: float | None = None) -> View | None:
        """The operator's document and counts; None if it says that nothing is new."""
        answer = self._calls.call("GET", path, expect=(200, 204, 304), limit=MAX_BYTES, reply=reply)
        return None if answer.status == 304 else _seen(answer)

    def _known(self) -> Known:
        with self._changed:
            return Known(self._view, self._counted)

    def _merge(self, answer: View | None, known: Known) -> View:
        """The newest view after `answer`; `known` is what was known when the request was sent.

        An older answer changes nothing. The expirations in `answer` are the operator's count; those of the view are
        counted here.
        """
        with self._changed:
            view = self._view
            if answer is None:
                return view or View(None, 0, 0)
            # An answer without a document is believed, unless a document came while that answer was on its way.
            newer = view is None or answer.version >= view.version or (answer.version == 0 and view is known.view)
            newest = answer if newer or view is None else view
            expirations = 0 if view is None else view.expirations
            # A smaller count is believed under the same condition: the next leader may have begun anew.
            if answer.expirations > self._counted or (
                answer.expirations < self._counted and known.counted == self._counted
            ):
                expirations += self._counted != NOTHING_COUNTED
                self._counted = answer.expirations
            # After a time without a document, versions may begin anew.
            era = 0 if view is None else view.era + (newest.version < view.version)
            self._view = View(newest.document, newest.version, expirations, era)
            if self._view != view:
                self._changed.notify_all()
            return self._view

    def _follow(self) -> bool:
        known = self._known()
        answer = self._look(f"{_path(known)}&wait={WAIT:g}", WAIT + 5.0)
        # An answer that changes nothing is older than the known view. False, so that the operator is not asked again at
        # once for the same answer.
        return self._merge(answer, known) != known.view or answer is None

    def _disconnect(self) -> None:
        self._calls.close()


def _path(known: Known) -> str:
    version = known.view.version if known.view is not None else 0
    return f"{DOCUMENT_PATH}?version={version}&{EXPIRATIONS_PARAMETER}={known.counted}"


def _presence(agent: str) -> str:
    return f"{PRESENCE_PATH}/{agent}"


def _seen(reply: Reply) -> View:
    document = reply.data if reply.status == 200 else None
    return View(document, _number(reply, VERSION_HEADER), _number(reply, EXPIRATIONS_HEADER))


def _grace(reply: Reply) -> float:
    """Seconds in which the operator writes the join request; 0 if it writes none."""
    try:
        seconds = float(reply.headers[GRACE_HEADER])
    except (KeyError, ValueError):
        raise StoreUnavailable(f"the operator's answer has no {GRACE_HEADER}: it may be no Everstep operator") from None
    return min(seconds, MAX_GRACE) if seconds > 0 else 0.0


def _number(reply: Reply, header: str) -> int:
    text = reply.headers.get(header, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise StoreUnavailable(f"the operator's answer has no {header}: it may be no Everstep operator")
    return int(text)
