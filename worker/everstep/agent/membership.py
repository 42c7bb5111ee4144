"""Connects the agent to the rendezvous: opens its driver, and sends its changes to the store in order.

Invariants: changes reach the store in the order of their decisions; each is repeated until the store has answered; a
join begins when all changes before it are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from everstep.agent.arguments import Arguments, UsageError
from everstep.agent.decide.events import Changed, Charged, Event, Formed, MemberCommand, NotFormed, ProcessesFirst
from everstep.agent.tasks import Tasks
from everstep.contract import env
from everstep.contract.addresses import loopback
from everstep.contract.document import FINISHED, Document, DocumentInvalid, Member, Sizes
from everstep.membership.backends import configuration
from everstep.membership.backends.configuration import Configuration, ConfigurationInvalid
from everstep.membership.backends.memory import MemoryStore
from everstep.membership.backends.opening import open_store
from everstep.membership.commands import Charge
from everstep.membership.draining import Coming, another_asked, coming, staying
from everstep.membership.driver import CROWDED, WHOLE, Driver
from everstep.membership.errors import (
    JoinRefused,
    JoinTimedOut,
    ProcessesNeeded,
    RendezvousClosed,
    RendezvousFailed,
    StoreRefused,
)
from everstep.membership.formation.selection import expected_rank
from everstep.membership.identity import agent_id, own_address
from everstep.membership.joining import JoinSettings
from everstep.membership.machine import Rejected
from everstep.membership.peers.peer_monitor import PeerMonitor
from everstep.membership.proposals import Patience
from everstep.membership.world_state import Round, WorldState

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
CHARGE_SECONDS = 5.0  # for the store to count a failure; then the agent uses its own count
AGAIN_SECONDS = 0.2


class Membership:
    """`post` takes events in the loop's thread. `spent`: advice to the user if the job was over before this agent came.
    It is empty if that is no mistake, because no other job can have its name."""

    def __init__(self, driver: Driver, timeout: float, post: Callable[[Event], None], spent: str = "") -> None:
        self._driver, self._timeout, self._post, self._spent = driver, timeout, post, spent
        self._changes: asyncio.Queue[tuple[MemberCommand | None, Callable[[], None] | None]] = asyncio.Queue()
        self._tasks = Tasks(self._failed)
        self._round: Round | None = None
        # What an agent that was in no round yet may expect: its rank, and the number of agents.
        self.expected_rank: tuple[int, int] | None = None

    def start(self) -> None:
        self._tasks.start(self._change_all())

    async def keeps(self) -> bool:
        """Whether the job's processes keep their memory, as far as the store shows now."""
        try:
            document = await asyncio.to_thread(self._driver.document)
        except RendezvousFailed:
            return False
        if document is not None:
            self.expected_rank = expected_rank(document, self._driver.index)
        return document is not None and document.in_process and document.closed is None

    def enough_without_us(self) -> bool:
        """Whether the others could train on, or may get others to train on with, as far as is known now."""
        document = self._driver.seen()
        if document is None or document.closed is not None:
            return False
        replaceable = document.in_process and coming(document) is not Coming.NEVER
        return replaceable or staying(document, self._driver.agent).suffices

    def another_leaves(self) -> bool:
        """Whether another member is asked to stop, and this agent and others go on, as far as is known now."""
        document = self._driver.seen()
        if document is None or document.closed is not None or self._driver.agent in document.stopping:
            return False
        return another_asked(document, self._driver.agent) and staying(document).suffices

    def change(self, change: MemberCommand) -> None:
        self._changes.put_nowait((change, None))

    def join(self, after: int, store_port: int, *, prepared: bool) -> None:
        """Ask for a round newer than `after`, once all changes are made; `Formed`, `NotFormed` or, if this agent is not
        `prepared`, `ProcessesFirst` answers."""

        def begin() -> None:
            self._tasks.start(self._join(after, store_port, prepared))

        self._changes.put_nowait((None, begin))

    def _failed(self, error: BaseException) -> None:
        log.error("the rendezvous failed", exc_info=error)
        self._post(NotFormed(f"the rendezvous failed: {type(error).__name__}: {error}"))

    async def leave(self) -> None:
        """Leave the rendezvous, and end all work in progress."""
        await asyncio.to_thread(self._driver.leave)
        await self._tasks.close()

    async def flush(self, seconds: float) -> None:
        """Wait until all changes are made, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changes.join(), seconds)

    async def _change_all(self) -> None:
        while True:
            change, then = await self._changes.get()
            try:
                if change is not None:
                    await self._make(change)
                if then is not None:
                    then()
            finally:
                self._changes.task_done()

    async def _make(self, change: MemberCommand) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + CHARGE_SECONDS
        while True:
            try:
                done = await asyncio.to_thread(self._apply, change)
                if done is not CROWDED:
                    break
                await asyncio.sleep(AGAIN_SECONDS)
            except StoreRefused as e:
                log.warning("%s: %s", change, e)
                done = None
                break
            except RendezvousFailed as e:
                if isinstance(change, Charge) and clock() > until:
                    log.warning("the round store does not count this failure: %s", e)
                    done = None
                    break
                await asyncio.sleep(AGAIN_SECONDS)
        if isinstance(done, Rejected):
            log.debug("%s: %s", change, done.reason)
        if isinstance(change, Charge):
            if isinstance(done, Document):
                self._post(Charged(done.restarts))
            elif done is None:
                self._post(Charged(None))

    def _apply(self, command: MemberCommand) -> Document | Rejected | None:
        """Apply the command. None: the store cannot count this failure."""
        done = self._driver.change(command)
        refused = isinstance(done, Rejected) and done is not CROWDED
        if refused and isinstance(command, Charge) and _forgotten(self._driver.seen(), command.round):
            return None
        return done

    async def _join(self, after: int, store_port: int, prepared: bool) -> None:
        try:
            formed = await asyncio.to_thread(
                self._driver.join, self._timeout, store_port=store_port, after=after, prepared=prepared
            )
        except ProcessesNeeded as e:
            log.info("%s", e)
            await self.keeps()
            self._post(ProcessesFirst())
            return
        except RendezvousClosed as e:
            if e.before and self._spent:
                self._post(NotFormed(f"{e}; {self._spent}"))
            else:
                self._post(NotFormed(str(e), finished=e.why == FINISHED))
            return
        except (JoinTimedOut, JoinRefused, StoreRefused, DocumentInvalid) as e:
            self._post(NotFormed(str(e)))
            return
        document = self._driver.seen()
        keeps = document is not None and document.in_process
        self._round = formed
        history, stopping = ((), ()) if document is None else (document.history, document.stopping)
        self._post(Formed(formed, keeps, history, stopping))
        await self._watch(formed)

    async def _watch(self, formed: Round) -> None:
        seen: WorldState = WHOLE
        while self._round is formed:
            now = await asyncio.to_thread(self._driver.wait, LOOK_SECONDS, seen)
            if now != seen and self._round is formed:
                seen = now
                self._post(Changed(formed.number, now))


def _forgotten(document: Document | None, number: int) -> bool:
    """Whether the store lost its data, and no round newer than `number` was formed since."""
    return document is None or document.round < number


def _check(arguments: Arguments) -> None:
    """Check the rendezvous settings of an agent that is alone. It uses none of them, and a misspelt key would otherwise
    be found only with a second agent."""
    try:
        configuration.read(arguments.rendezvous, "localhost")
    except ConfigurationInvalid as e:
        raise UsageError(str(e)) from e


def open_driver(arguments: Arguments, processes: int, environ: Mapping[str, str]) -> tuple[Driver, float]:
    """The agent's driver, and the seconds that one rendezvous may take. Raises UsageError, RendezvousFailed."""
    low, high = arguments.nodes
    agent = agent_id()
    try:
        index = env.whole_number(environ, env.WORKER_INDEX, -1, low=-1)
        incarnation = env.whole_number(environ, env.INCARNATION, 0)
    except env.BadVariable as e:
        raise UsageError(str(e)) from e
    if arguments.local:
        _check(arguments)
        member = Member(index, agent, incarnation, processes, loopback())
        patience = JoinSettings(patience=Patience(0.0, 0.0), spread=0.0)
        return Driver(MemoryStore(), member, Sizes(1, 1), patience), Configuration(()).timeout
    try:
        store, settings = open_store(arguments.backend, arguments.endpoint, arguments.rendezvous, arguments.run_id)
        sizes = Sizes(low, high, settings.allowed)
    except (ConfigurationInvalid, DocumentInvalid) as e:
        raise UsageError(str(e)) from e
    address = arguments.address or own_address(settings.urls)
    peers = PeerMonitor(agent, "::" if ":" in address else "")
    member = Member(index, agent, incarnation, processes, address, link_port=peers.port)
    return Driver(store, member, sizes, settings.settings, peers=peers), settings.timeout
