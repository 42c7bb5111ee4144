"""One attempt to be in a round: look, write what `proposals` says, wait, again.

Invariant: whatever is lost on the way (an answer, a race, the store for a while), the next look starts from what the
store holds. An agent that is in the document only waits: who writes is the one who changes something, or, when nothing
changes for the last call, the first in line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import assert_never

from everstep.contract.document import Document, JoinRequest, decode, decode_join_request, encode
from everstep.membership import proposals
from everstep.membership.errors import DocumentInvalid, JoinRefused, JoinTimedOut, RendezvousClosed, StoreUnavailable
from everstep.membership.formation.selection import is_spare
from everstep.membership.proposals import Admitted, Barred, Patience, Proposal, Wait
from everstep.membership.store import Backoff, RoundStore, View
from everstep.membership.world_state import Closed, Round

log = logging.getLogger(__name__)

LONGEST_WAIT = 5.0  # seconds after which a joiner looks at everything again, whatever it was told
PER_WRITER = 1e-3  # seconds for each agent that waits, in which those that came late leave it to one to write for all
FEW = 16  # agents that wait; with more of them, a view is old before it is acted on
PER_AGENT = 1e-4  # seconds for each agent that waits: the more write and read, the less often each does


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """How patient an agent is. Seconds."""

    patience: Patience = field(default_factory=Patience)
    ttl: float = 3.0  # of its presence; it is renewed three times in that
    spread: float = 0.02  # in which agents that start together make their first write
    backoff: Backoff = field(default_factory=Backoff)
    # While the store does not answer: a thousand agents that ask again at once would keep it from ever doing so.
    away: Backoff = field(default_factory=lambda: Backoff(most=2.0))


class Joining:
    """`ask` makes the join request present, and gives the seconds for which the store is trusted to write it.

    `clock` is monotonic seconds.
    """

    def __init__(
        self,
        store: RoundStore,
        join_request: JoinRequest,
        settings: JoinSettings,
        random: Random,
        clock: Callable[[], float],
        ask: Callable[[JoinRequest], float],
        stopped: threading.Event,
    ) -> None:
        self._store, self._join_request, self._settings = store, join_request, settings
        self._random, self._clock, self._ask, self._stopped = random, clock, ask, stopped
        self._agent = join_request.member.agent
        self._view = View(None, 0)
        self._since = self._act_at = self._not_before = self._began = clock()
        self._look_first = False  # much may have happened since the last look
        self._attempt = 0  # writes in a row that came too late
        self._reason = "the store has not answered"

    def run(self, timeout: float) -> tuple[View, Round]:
        """The round, and the view in which it was found. Raises JoinTimedOut, JoinRefused, RendezvousClosed.

        The time in which a round runs that has no place for this agent does not count: it is a spare, and not late.
        """
        started, waited, failures = False, False, 0
        deadline = self._clock() + timeout
        while not self._stopped.is_set():
            if self._clock() >= deadline:
                if not self._is_no_fault():
                    break
                deadline = self._clock() + timeout
            try:
                if not started:
                    self._start()
                    started = True
                document = decoded(self._view)
                settled = proposals.outcome(document, self._join_request)
                if isinstance(settled, Admitted):
                    return self._view, settled.round
                if isinstance(settled, Closed):
                    why = f"{self._agent} cannot join, the job is closed: {settled.why}"
                    raise RendezvousClosed(why, settled.why, before=not waited and self._join_request.after == 0)
                waited = True
                now = self._clock()  # not before: a store in trouble takes seconds to answer
                if document is not None and is_spare(document, self._agent):
                    deadline = now + timeout
                if now < self._act_at:
                    self._wait(min(self._act_at, deadline) - now)
                else:
                    self._act(now)
                failures = 0
            except StoreUnavailable as e:
                failures, self._reason, self._look_first = failures + 1, str(e), True
                pause = self._settings.away.seconds(failures, self._random)
                self._stopped.wait(max(0.0, min(pause, deadline - self._clock())))
        why = "it was stopped" if self._stopped.is_set() else self._reason
        raise JoinTimedOut(
            f"{self._agent} was not taken into a round newer than {self._join_request.after} in time: {why}"
        )

    def _is_no_fault(self) -> bool:
        """Whether there is a reason to go on when the time is over. A store need not tell at once who waits."""
        try:
            fresh = self._store.read()
        except StoreUnavailable:
            return False
        if fresh.edition != self._view.edition:
            self._seen(fresh)
        document = decoded(self._view)
        if document is None or proposals.outcome(document, self._join_request) is not None:
            return document is not None
        return is_spare(document, self._agent)

    def _start(self) -> None:
        grace = self._ask(self._join_request)
        # Jittered: agents that a store does not write for after all do not all write first.
        self._not_before = self._clock() + self._random.uniform(1, 2) * grace
        self._look_first = grace > 0
        self._seen(self._store.watch(self._view, 0.0) if grace > 0 else self._store.read())
        if not self._is_written():
            # Nor do agents that were started together: one of them writes for all.
            spread = self._settings.spread + self._crowd() * PER_WRITER
            self._act_at = max(self._not_before, self._clock() + self._random.uniform(0, spread))

    def _seen(self, view: View) -> None:
        """A document that is new to this agent, so that it has stood still for no time."""
        self._view, self._since = view, self._clock()
        if self._is_written():
            pause = min(LONGEST_WAIT, self._settings.patience.call(decoded(self._view)))
            pause = min(pause, self._until_shrink(self._since) or pause)
            self._act_at = self._since + pause + self._stagger()
        else:
            pause = self._random.uniform(0, self._crowd() * PER_WRITER)
            pause += self._settings.backoff.seconds(self._attempt, self._random)
            self._act_at = max(self._not_before, self._since + pause)

    def _wait(self, seconds: float) -> None:
        if self._is_written():
            # While others come in, the document changes all the time, and nothing in it is news to this agent.
            self._stopped.wait(min(seconds, self._crowd() * PER_AGENT))
        fresh = self._store.watch(self._view, seconds)
        if fresh.edition != self._view.edition:
            self._attempt = 0
            self._seen(fresh)
        elif fresh.expirations != self._view.expirations:
            self._view = fresh
            self._act_at = min(self._act_at, self._clock() + self._stagger())

    def _act(self, now: float) -> None:
        if self._look_first or self._crowd() > FEW:
            # Another has most likely written for this agent too: to look is cheaper than to propose in vain.
            fresh = self._store.read()
            self._look_first = False
            if fresh.edition != self._view.edition:
                self._seen(fresh)
                return
        patience = self._settings.patience
        document = decoded(self._view)
        waited = patience.waited(now - self._since, document)
        present = read_join_requests(self._store)
        shrink = self._until_shrink(now) == 0
        step = proposals.propose_join(document, self._join_request, present, waited, shrink=shrink)
        match step:
            case Proposal(proposed, reasons):
                data = encode(proposed)
                version = self._store.compare_and_swap(self._view.version, data)
                if version is None:
                    self._attempt += 1
                    self._seen(self._store.read())
                else:
                    self._attempt = 0
                    log.debug("version %d: %s", version, "; ".join(reasons[:10]))
                    self._seen(replace(self._view, document=data, version=version))
            case Wait(reason):
                self._reason = reason
                pause = min(LONGEST_WAIT, patience.next_after(now - self._since, document))
                self._act_at = now + min(pause, self._until_shrink(now) or pause) + self._stagger()
            case Barred(why):
                raise JoinRefused(why)
            case _:
                assert_never(step)

    def _is_written(self) -> bool:
        return proposals.is_written(decoded(self._view), self._join_request)

    def _until_shrink(self, now: float) -> float:
        """Seconds for which replacements are still waited for."""
        return max(0.0, self._began + self._settings.patience.shrink_after - now)

    def _crowd(self) -> int:
        document = decoded(self._view)
        return 0 if document is None else len(document.joining)

    def _stagger(self) -> float:
        document = decoded(self._view)
        return 0.0 if document is None else proposals.stagger(document, self._agent)


def decoded(view: View) -> Document | None:
    """The view's document. Raises DocumentInvalid."""
    return None if view.document is None else _decode(view.document)


def read_join_requests(store: RoundStore) -> dict[str, JoinRequest]:
    """Who is present and what each wants; a presence that is no join request is left out, and so counts as expired."""
    found = {}
    for agent, value in store.present().items():
        try:
            found[agent] = _decode_join_request(value)
        except DocumentInvalid as e:
            log.warning("the presence of %s is ignored: %s", agent, e)
    return found


# Threads of one process that watch one job (tests, simulations) read each document once.
@lru_cache(maxsize=4)
def _decode(data: bytes) -> Document:
    return decode(data)


@lru_cache(maxsize=8192)
def _decode_join_request(value: bytes) -> JoinRequest:
    return decode_join_request(value)
