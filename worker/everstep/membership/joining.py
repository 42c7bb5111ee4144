"""One agent's attempt to get into a round: it reads the document, writes what `proposals` says, waits, and repeats.

Invariant: after a lost answer, a lost race or an outage of the store, the next attempt starts from what the store
holds. An agent whose join request is in the document only waits. An agent writes if it has something to change, or if
it is first in line and nothing has changed during the last call.
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
from everstep.membership.errors import (
    DocumentInvalid,
    JoinRefused,
    JoinTimedOut,
    ProcessesNeeded,
    RendezvousClosed,
    StoreUnavailable,
)
from everstep.membership.formation.selection import is_spare
from everstep.membership.proposals import Admitted, Barred, Patience, Proposal, Wait
from everstep.membership.store import Backoff, RoundStore, View
from everstep.membership.world_state import Closed, Round

log = logging.getLogger(__name__)

LONGEST_WAIT = 5.0  # seconds after which a joiner reads everything again, even if it heard of no change
PER_WRITER = 1e-3  # seconds for each waiting agent; late agents spread their writes over this, so that one may do all
FEW = 16  # waiting agents; with more of them, a view is out of date before an agent acts on it
PER_AGENT = 1e-4  # seconds for each waiting agent: with more of them, each one reads and writes less often


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """How long an agent waits, in seconds."""

    patience: Patience = field(default_factory=Patience)
    ttl: float = 3.0  # of its presence, which is renewed three times in this time
    spread: float = 0.02  # agents that start together spread their first writes over this time
    backoff: Backoff = field(default_factory=Backoff)
    # For a store that does not answer: a thousand agents that repeat at once would keep it down.
    away: Backoff = field(default_factory=lambda: Backoff(most=2.0))


class Joining:
    """`ask` announces the join request, and returns how many seconds to leave the writing of it to the store.

    `prepared`: the agent needs no processes before it joins, or has them. `clock` is monotonic seconds.
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
        *,
        prepared: bool = True,
    ) -> None:
        self._store, self._join_request, self._settings = store, join_request, settings
        self._random, self._clock, self._ask, self._stopped = random, clock, ask, stopped
        self._prepared = prepared
        self._agent = join_request.member.agent
        self._view = View(None, 0)
        self._since = self._act_at = self._not_before = self._began = clock()
        self._look_first = False  # read before writing, because the view may be out of date
        self._attempt = 0  # writes in a row that came too late
        self._reason = "the store has not answered"

    def run(self, timeout: float) -> tuple[View, Round]:
        """The round, and the view in which it was found. Raises JoinTimedOut, JoinRefused, RendezvousClosed,
        ProcessesNeeded.

        The timeout does not run while this agent is a spare: a round runs that has no place for it.
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
                outcome = proposals.outcome(document, self._join_request)
                if isinstance(outcome, Admitted):
                    return self._view, outcome.round
                if isinstance(outcome, Closed):
                    why = f"{self._agent} cannot join, the job is closed: {outcome.why}"
                    raise RendezvousClosed(why, outcome.why, before=not waited and self._join_request.after == 0)
                if document is not None and document.in_process and not self._prepared:
                    raise ProcessesNeeded(f"{self._agent} waits without processes, and those of the others keep theirs")
                waited = True
                now = self._clock()  # after the calls above: a store in trouble takes seconds to answer
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
        """Whether to go on after the timeout: a fresh read shows that the request is settled, or that this agent is a
        spare. A store need not show at once who waits."""
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
        # Jittered: if the store does not write the requests after all, not all agents write at once.
        self._not_before = self._clock() + self._random.uniform(1, 2) * grace
        self._look_first = grace > 0
        self._seen(self._store.watch(self._view, 0.0) if grace > 0 else self._store.read())
        if not self._is_written():
            # Jittered too: of agents that were started together, one writes for all.
            spread = self._settings.spread + self._crowd() * PER_WRITER
            self._act_at = max(self._not_before, self._clock() + self._random.uniform(0, spread))

    def _seen(self, view: View) -> None:
        """Take a new document: the time for which it has stood unchanged begins now."""
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
            # While others join, the document changes all the time, and no such change matters to this agent.
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
            # Another agent has most likely written for this one too. A read is cheaper than a write that fails.
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
        """Seconds that are left of the wait for replacements."""
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
    """The join requests of the present agents. A presence that is no join request is left out: it counts as expired."""
    requests = {}
    for agent, value in store.present().items():
        try:
            requests[agent] = _decode_join_request(value)
        except DocumentInvalid as e:
            log.warning("the presence of %s is ignored: %s", agent, e)
    return requests


# Cached, so that threads of one process that watch one job (tests, simulations) decode each document once.
@lru_cache(maxsize=4)
def _decode(data: bytes) -> Document:
    return decode(data)


@lru_cache(maxsize=8192)
def _decode_join_request(value: bytes) -> JoinRequest:
    return decode_join_request(value)
