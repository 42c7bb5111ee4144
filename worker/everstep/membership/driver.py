"""Takes one agent through the rendezvous: it joins, stays present, watches, and hears at once when its round is over.

This module decides nothing; `proposals` and `machine` decide. It adds a monotonic clock, two threads, and retries for a
store that does not answer or a write that came too late. Invariant: a slow or unavailable store changes nothing in a
formed round; it only delays the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

from everstep.contract.document import Document, JoinRequest, Member, Report, Sizes, encode
from everstep.membership import proposals
from everstep.membership.commands import CloseJob, Command, Evict, Leave, Reach
from everstep.membership.errors import JoinTimedOut, ProcessesNeeded, RendezvousFailed, StoreUnavailable
from everstep.membership.joining import Joining, JoinSettings, decoded, read_join_requests
from everstep.membership.machine import MAX_FLAPS, Rejected, apply, is_here
from everstep.membership.peers.peer_monitor import PeerMonitor
from everstep.membership.store import RoundStore, View
from everstep.membership.world_state import Broken, Round, Whole, WorldState, describe, world_state

log = logging.getLogger(__name__)

LOOK = 0.5  # seconds between a thread's checks whether it must stop
WHOLE = Whole()
TRIES = 20  # attempts at a change while other agents write too
CROWDED = Rejected("others changed the document all the time")


class Driver:
    """One agent of one job. Thread-safe, except that one thread at a time may `join`."""

    def __init__(
        self,
        store: RoundStore,
        member: Member,
        sizes: Sizes,
        settings: JoinSettings | None = None,
        *,
        random: Random | None = None,
        peers: PeerMonitor | None = None,
    ) -> None:
        self._store, self._member, self._sizes = store, member, sizes
        self._settings = settings or JoinSettings()
        self._random = random or Random()  # noqa: S311 - jitter
        self._peers = peers
        self._changed = threading.Condition()
        self._join_request: JoinRequest | None = None  # the announced one
        self._announcing = threading.Lock()  # an old join request must not reach the store after a newer one
        self._round: Round | None = None
        self._after = 0
        self._view = View(None, 0)
        self._expirations = 0  # how many were handled
        self._late = 0  # reads in a row that the store did not answer
        self._world_state: WorldState = Broken("not joined yet")
        self._joining = False
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._away = False

    @property
    def agent(self) -> str:
        """This agent's id."""
        return self._member.agent

    @property
    def index(self) -> int:
        """The index of its worker; -1: it has none of its own."""
        return self._member.index

    # --- joining

    def join(
        self, timeout: float, *, store_port: int | None = None, after: int | None = None, prepared: bool = True
    ) -> Round:
        """Join a round newer than the last one (or than `after`); blocks for at most `timeout` seconds. `prepared`: the
        agent has its processes, or knows of no reason to start them before.

        Raises JoinTimedOut, JoinRefused, RendezvousClosed, ProcessesNeeded, or the store's final error. After a failure
        the others do not wait for this agent.
        """
        member = self._member if store_port is None else replace(self._member, store_port=store_port)
        with self._changed:
            self._joining, self._round = True, None
            patient = self._settings.patience.shrink_after > 0
            join_request = JoinRequest(member, self._after if after is None else after, self._sizes, patient)
            self._world_state = Broken("joining")
        try:
            joining = Joining(
                self._store, join_request, self._settings, self._random, time.monotonic, self._ask, self._stopping,
                prepared=prepared,
            )  # fmt: skip
            view, formed = joining.run(timeout)
        except (JoinTimedOut, ProcessesNeeded):
            self._withdraw()
            raise
        finally:
            with self._changed:
                self._joining = False
                self._changed.notify_all()
        with self._changed:
            self._round, self._after, self._view, self._expirations = formed, formed.number, view, view.expirations
            self._world_state = self._read_world_state(view)
            self._changed.notify_all()
        if self._peers is not None:
            self._peers.follow(formed, self, self._settings.ttl)
        log.info("round %d: rank %d of %d agents", formed.number, formed.rank, formed.world_size)
        return formed

    def _ask(self, join_request: JoinRequest) -> float:
        with self._announcing:
            grace = self._store.announce(join_request.member.agent, join_request.encode(), self._settings.ttl)
            self._join_request = join_request
        with self._changed:
            if not self._threads:
                for work, name in ((self._keep, "everstep-present"), (self._keep_looking, "everstep-rendezvous")):
                    thread = threading.Thread(target=work, name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)
        return grace

    def _withdraw(self) -> None:
        """Take the join request back."""
        if self._stopping.is_set():
            return
        with self._announcing:
            self._join_request = None
        try:
            self._change(lambda _: Leave(self._member.agent, "it gave up"))
            self._store.withdraw(self._member.agent)
        except RendezvousFailed as e:
            log.debug("gave up without saying so: %s", e)

    def _sleep(self, seconds: float, deadline: float) -> None:
        with self._changed:
            self._changed.wait(max(0.0, min(seconds, deadline - time.monotonic())))

    # --- in a round

    def world_state(self) -> WorldState:
        """The state of the joined round as this agent knows it; does not ask the store."""
        with self._changed:
            return self._world_state

    def wait(self, timeout: float, seen: WorldState = WHOLE) -> WorldState:
        """Wait until the world state differs from `seen`, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._world_state == seen and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._world_state

    def seen(self) -> Document | None:
        """The document that this agent read last; does not ask the store."""
        with self._changed:
            return decoded(self._view)

    def document(self) -> Document | None:
        """The document in the store now."""
        return decoded(self._store.read())

    def change(self, command: Command) -> Document | Rejected:
        """Apply this agent's command to the document in the store. Raises the store's errors."""
        # Only a job that no agent has joined yet can be closed without a document.
        outside = isinstance(command, CloseJob) and command.outside
        begun = Document(self._sizes, id=self._member.agent) if outside else None
        return self._change(lambda _: command, begun)

    def evict(self, agent: str, why: str) -> Document | Rejected:
        """Take out an agent that is known to be gone."""
        return self._change(lambda document: Evict(self._member.agent, document.round, agent, why))

    def report(self, agent: str, reaches: bool) -> Document | Rejected:
        """Say that this agent does not reach another, or that it does again."""
        return self._change(lambda document: Reach(self._member.agent, document.round, agent, reaches))

    def leave(self) -> None:
        """Leave, and tell the others, so that they need not wait for the lease. Best effort."""
        self._stopping.set()  # first, so that no thread announces this agent again after it has left
        try:
            self._change(lambda _: Leave(self._member.agent))
            self._store.withdraw(self._member.agent)
        except RendezvousFailed as e:
            log.warning("left without saying so: %s", e)
        self.stop()

    def stop(self) -> None:
        """End the threads and the store's connections without telling the others, as a crash would."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if self._peers is not None:
            self._peers.close()
        self._store.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._settings.ttl)

    def _change(self, make: Callable[[Document], Command], begun: Document | None = None) -> Document | Rejected:
        """`begun`: the document to change if the store has none."""
        for attempt in range(1, TRIES + 1):
            view = self._store.read()
            self._see(view)  # even if nothing is left to change because another agent did it
            document = decoded(view) or begun
            if document is None:
                return Rejected("there is no round")
            after = apply(document, make(document))
            if isinstance(after, Rejected):
                return after
            data = encode(after)
            version = self._store.compare_and_swap(view.version, data)
            if version is not None:
                self._see(replace(view, document=data, version=version))
                return after
            self._sleep(self._settings.backoff.seconds(attempt, self._random), float("inf"))
        return CROWDED

    def lost(self, agent: str, why: str) -> bool:
        """The peer monitor calls this when the agent's process is gone. See `peer_monitor.PeerObserver`."""
        return self._quietly(lambda: self.evict(agent, why)) not in (None, CROWDED)

    def unreached(self, agent: str) -> int:
        """The peer monitor calls this when it does not reach `agent`. See `peer_monitor.PeerObserver`."""
        pair = self._judged(agent, reaches=False)
        return pair.times if pair is not None and pair.active else 0

    def reached(self, agent: str) -> bool:
        """The peer monitor calls this when it reaches `agent` again."""
        pair = self._judged(agent, reaches=True)
        return pair is not None and (not pair.active or pair.times >= MAX_FLAPS)

    def _judged(self, agent: str, *, reaches: bool) -> Report | None:
        """The document's report on the pair after this agent added its finding; None if the store does not answer."""
        low, high = sorted((self.agent, agent))
        done = self._quietly(lambda: self.report(agent, reaches))
        if isinstance(done, Rejected):
            log.debug("%s", done.reason)
            done = self._quietly(self.document)
        if not isinstance(done, Document):
            return None
        return next((r for r in done.reports if (r.low, r.high) == (low, high)), Report(low, high, False, 0))

    def _quietly(self, change: Callable[[], Document | Rejected | None]) -> Document | Rejected | None:
        try:
            return change()
        except RendezvousFailed as e:
            # One warning for each outage of the store, however often this is tried.
            quiet = self._away or self._stopping.is_set()  # a leaving agent has told everything already
            log.log(logging.DEBUG if quiet else logging.WARNING, "could not tell the others: %s", e)
            return None

    # --- the threads: one renews the presence, which is quick; one watches, which takes as long as the store takes

    def _keep(self) -> None:
        third = self._settings.ttl / 3
        failures, due = 0, time.monotonic() + third
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + third  # from the start of the call, however long the store takes
            try:
                self._renew()
            except Exception as e:
                # Failures must not make this wait longer than a third of the lease: a store that comes back without its
                # presences gives each agent one lease to announce itself again.
                failures += 1
                due = time.monotonic() + min(third, self._settings.away.seconds(failures, self._random))
                self._failed("the round store cannot be used; the present round goes on", e, first=not self._away)
                self._away = True
            else:
                if self._away:
                    log.info("the round store answers again")
                self._away, failures = False, 0

    def _keep_looking(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self._watch_until(time.monotonic() + LOOK)
                failures = 0
            except Exception as e:
                failures += 1
                self._failed("what the round store holds is not known", e, first=failures == 1 and not self._away)
                self._stopping.wait(self._settings.away.seconds(failures, self._random))

    def _failed(self, what: str, error: Exception, *, first: bool) -> None:
        """Log the first failure in a row as a warning. The thread goes on: without it this agent would hear of no
        change, or the others would give it up."""
        if not isinstance(error, RendezvousFailed):
            log.error("%s", what, exc_info=error)
        elif not self._stopping.is_set():
            # The store is unavailable or refuses for good. Either way a formed round needs no store.
            log.log(logging.WARNING if first else logging.DEBUG, "%s: %s", what, error)

    def _renew(self) -> None:
        if self._join_request is None or self._store.renew(self.agent) or self._stopping.is_set():
            return
        log.warning("this agent's lease had expired: the others may have gone on without it")
        with self._announcing:
            if self._join_request is not None:
                self._store.announce(self.agent, self._join_request.encode(), self._settings.ttl)

    def _watch_until(self, when: float) -> None:
        with self._changed:
            seen = replace(self._view, expirations=self._expirations)
            if self._joining or self._round is None:
                self._changed.wait(max(0.0, when - time.monotonic()))
                return
        fresh = self._store.watch(seen, max(0.0, when - time.monotonic()))
        self._see(fresh)
        if fresh.expirations != seen.expirations:
            try:
                self._evict_expired()
            except StoreUnavailable as e:
                # Among many agents, another one probably writes this now. If the store is down, the next read shows it.
                log.debug("looking again for who expired: %s", e)
                self._late += 1
                self._sleep(self._settings.backoff.seconds(self._late, self._random), float("inf"))
                return
            self._expirations, self._late = fresh.expirations, 0

    def _see(self, view: View) -> None:
        with self._changed:
            # A view that another thread read before this round was formed says nothing about this round.
            if self._joining or self._round is None or _is_older(view, self._view):
                return
            self._view = view
            before, self._world_state = self._world_state, self._read_world_state(view)
            if before != self._world_state:
                log.info("round %d: %s", self._round.number, describe(self._world_state))
                self._changed.notify_all()

    def _read_world_state(self, view: View) -> WorldState:
        if self._round is None:
            return Broken("not joined yet")
        return world_state(decoded(view), self._round.number, self._member.agent)

    def _evict_expired(self) -> None:
        """Remove expired agents from the document. Agents do this one after the other, and mostly the first one does
        it for all."""
        view = self._store.read()
        document = decoded(view)
        if document is None:
            return
        self._sleep(proposals.stagger(document, self._member.agent), float("inf"))
        for _ in range(TRIES):
            view = self._store.read()
            document = decoded(view)
            if document is None or not is_here(document, self._member.agent):
                return
            after, reasons = proposals.without_expired(document, self._member.agent, read_join_requests(self._store))
            if not reasons or self._store.compare_and_swap(view.version, encode(after)) is not None:
                self._see(self._store.read())
                return


def _is_older(view: View, seen: View) -> bool:
    """Whether `view` is older than `seen`. Versions grow within an era; version 0 is newer, because the document is
    gone."""
    return view.edition < seen.edition and not (view.era == seen.era and view.version == 0)
