"""A rendezvous handler for stock torchrun, over any round store. The only module of this package that imports torch.

Each round has a process-group store of its own, in the agent of rank 0. It is bound before that agent asks to join: so
its port is known with the round, and need not be guessed. If the store dies, only that round ends. The agents' keys in
it are prefixed with the round, so a latecomer of an old round reads nothing of this one.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from everstep.contract import env
from everstep.contract.document import Document, Member, Sizes
from everstep.membership.backends.configuration import Configuration, ConfigurationInvalid
from everstep.membership.backends.opening import remedy
from everstep.membership.commands import CloseJob, Done
from everstep.membership.driver import CROWDED, Driver
from everstep.membership.errors import (
    DocumentInvalid,
    JoinRefused,
    JoinTimedOut,
    RendezvousClosed,
    RendezvousFailed,
    StoreRefused,
    StoreUnavailable,
)
from everstep.membership.formation.selection import growth
from everstep.membership.identity import agent_id, own_address
from everstep.membership.machine import Rejected
from everstep.membership.peers.peer_monitor import PeerMonitor
from everstep.membership.store import RoundStore
from everstep.membership.torch_log import warnings_off
from everstep.membership.world_state import Broken, Closed, Finishing, Growing, Left, Round, Stopping, Whole

log = logging.getLogger(__name__)

CONNECT = 2.0  # seconds for one attempt to connect to rank 0's store; then the round is checked again
STORE_TIMEOUT = timedelta(seconds=300)  # of a call on that store; torch's default
LOOK = 0.01  # seconds between checks of how many members have arrived
ARRIVAL_TIMEOUT = 60.0  # seconds for the members to arrive, at least, however long the join took
AGAIN = 0.2  # seconds between attempts at a write that the round store did not answer
# torch's variable. With it, the processes make a process-group store of their own, at a free port of rank 0's machine.
NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class RoundHandler(RendezvousHandler):
    """torchrun's view of a `Driver`."""

    def __init__(
        self, backend: str, parameters: RendezvousParameters, store: RoundStore, settings: Configuration
    ) -> None:
        self._backend, self._run_id = backend, parameters.run_id
        self._timeout, self._close_timeout = settings.timeout, settings.close_timeout
        try:
            sizes = Sizes(parameters.min_nodes, parameters.max_nodes, settings.allowed)
        except DocumentInvalid as e:
            raise ConfigurationInvalid(f"--nnodes and --rdzv-conf allowed: {e}") from e
        self._address = parameters.local_addr or own_address(settings.urls)
        agent = agent_id()
        self._peers = PeerMonitor(agent, "::" if ":" in self._address else "")
        member = Member(
            index=env.whole_number(os.environ, env.WORKER_INDEX, -1, low=-1),
            agent=agent,
            incarnation=env.whole_number(os.environ, env.INCARNATION, 0),
            address=self._address,
            link_port=self._peers.port,
        )
        self._driver = Driver(store, member, sizes, settings.settings, peers=self._peers)
        self._server: TCPStore | None = None
        self._number = 0  # of the round that this agent was in last
        self._in_round = False  # true from a round's start until torchrun asks for the next round
        self._closed = False  # whether this handler has closed the job
        # torchrun does not shut a handler down when a signal ends torchrun. The others should not wait for the lease.
        self._leave = weakref.finalize(self, _leave, self._driver, os.getpid())

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return os.environ.get(NOT_SHARED, "0") != "1"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; all its members have reached its store when this returns."""
        if self._closed or not self._leave.alive:
            raise RendezvousClosedError("this handler has closed the rendezvous, or was shut down")
        deadline, self._in_round = time.monotonic() + self._timeout, False
        # The old server lives until the new one is bound, so that the new port differs.
        server = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
        self._server = server
        while True:
            formed = self._join(deadline - time.monotonic(), server.port)
            deadline = max(deadline, time.monotonic() + ARRIVAL_TIMEOUT)
            with warnings_off():  # members may die now, and this handler logs that itself
                arrived = self._await_peers(formed, server, deadline)
            if arrived is not None:
                break
        if formed.rank != 0:
            self._server = None
        self._number, self._in_round = formed.number, True
        # torchrun starts its processes with this environment. It holds the round, so their commits can be fenced.
        os.environ |= {env.ROUND: str(formed.number), env.RENDEZVOUS: formed.rendezvous}
        store, address = arrived
        return RendezvousInfo(store, formed.rank, formed.world_size, address)

    def _join(self, timeout: float, port: int) -> Round:
        try:
            return self._driver.join(max(0.0, timeout), store_port=port)
        except RendezvousClosed as e:
            what = f"; {remedy(self._backend, self._run_id)}" if e.before else ""
            raise RendezvousClosedError(f"{e}{what}") from e
        except JoinTimedOut as e:
            raise RendezvousTimeoutError(str(e)) from e
        except (StoreRefused, StoreUnavailable) as e:
            raise RendezvousConnectionError(str(e)) from e
        except (JoinRefused, DocumentInvalid) as e:
            raise RendezvousStateError(str(e)) from e

    def _await_peers(
        self, formed: Round, server: TCPStore, deadline: float
    ) -> tuple[Store, RendezvousStoreInfo] | None:
        """Wait until all members have come. Returns the round's store and the address of the processes' store, or None
        if the round broke before.

        torchrun gives up for good if a peer dies while it hands out ranks. So no member begins that before all came.
        """
        store = server if formed.rank == 0 else self._connect(formed, deadline)
        if store is None:
            return None
        key = f"everstep/here/{formed.number}"
        try:
            here = store.add(key, 1)
            while here < formed.world_size:
                if not self._intact() or time.monotonic() > deadline:
                    return None
                time.sleep(LOOK)
                here = store.add(key, 0)
            own = PrefixStore(f"everstep/round/{formed.number}", store)
            return own, self._process_store(formed, own)
        except DistError as e:
            log.warning("the store of round %d is gone: %s", formed.number, e)
            self._await_break(deadline)
            return None

    def _process_store(self, formed: Round, store: Store) -> RendezvousStoreInfo:
        if not self.use_agent_store:
            return RendezvousStoreInfo.build(formed.rank, store, local_addr=self._address)
        first = formed.members[0]
        return RendezvousStoreInfo(first.address, first.store_port)

    def _connect(self, formed: Round, deadline: float) -> Store | None:
        first = formed.members[0]
        while self._intact() and time.monotonic() < deadline:
            try:
                store = TCPStore(first.address, first.store_port, is_master=False, timeout=timedelta(seconds=CONNECT))
            except DistError as e:
                log.warning("rank 0's store at %s:%d: %s", first.address, first.store_port, e)
                continue
            store.set_timeout(STORE_TIMEOUT)
            return store
        return None

    def _intact(self) -> bool:
        return isinstance(self._driver.world_state(), Whole | Growing | Finishing)

    def _await_break(self, deadline: float) -> None:
        """Wait for the round to break: rank 0's store is gone, so the peer monitor or the lease will show that."""
        while self._intact() and time.monotonic() < deadline:
            self._driver.wait(min(1.0, CONNECT))

    def num_nodes_waiting(self) -> int:
        """More than 0 makes torchrun restart its processes in a new round: a member is gone, or one more would fit."""
        if not self._in_round:
            document = self._look()
            return growth(document) if document is not None and document.round else 0
        match self._driver.world_state():
            case Growing(count, _):
                return count
            case Broken():
                return 1
            case Closed() | Whole() | Finishing() | Stopping() | Left():  # the last two need a `Stop`, not sent here
                return 0

    def is_closed(self) -> bool:
        if self._closed or isinstance(self._driver.world_state(), Closed):
            return True
        if self._in_round or not self._leave.alive:
            return False  # the driver would have shown it
        document = self._look()
        return document is not None and document.closed is not None

    def set_closed(self) -> None:
        """Close the job for all agents: no round follows. Raises torch's error if the store cannot be reached."""
        if not self._closed:
            self._close("an agent closed the rendezvous", outside=True)

    def shutdown(self) -> bool:
        """torchrun calls this when its processes have succeeded, or failed for good.

        No round follows, unless this worker is started again, as the operator does in a TrainingJob.
        """
        if not self._leave.alive:
            return True
        failed = sys.exception() is not None  # torchrun calls this in a `finally`, while its error is on the way
        try:
            if env.JOB_UID in os.environ and self._number and not failed:
                self._say(lambda: self._driver.change(Done(self._driver.agent, self._number)))
            elif env.JOB_UID not in os.environ or not failed:
                # A failure before this agent's first round must not end the others' job.
                self._close("an agent finished", outside=not failed)
        except RendezvousError as e:
            log.warning("the others could not be told of this agent's end: %s", e)
            return False
        finally:
            self._leave()
        return True

    def _look(self) -> Document | None:
        """The document in the store now. A handler in no round has to ask for it: its driver watches nothing then."""
        try:
            return self._driver.document()
        except DocumentInvalid as e:
            raise RendezvousStateError(str(e)) from e
        except RendezvousFailed as e:
            raise RendezvousConnectionError(str(e)) from e

    def _close(self, why: str, *, outside: bool) -> None:
        self._say(lambda: self._driver.change(CloseJob(self._driver.agent, why, outside)))
        self._closed = True

    def _say(self, change: Callable[[], Document | Rejected]) -> None:
        """Make the change; try again for up to `close_timeout` seconds while the store is unavailable."""
        until = time.monotonic() + self._close_timeout
        while True:
            try:
                done = change()
                if done is not CROWDED:
                    break
                why = CROWDED.reason
            except StoreUnavailable as e:
                why = str(e)
            except DocumentInvalid as e:
                raise RendezvousStateError(str(e)) from e
            except RendezvousFailed as e:
                raise RendezvousConnectionError(str(e)) from e
            if time.monotonic() + AGAIN > until:
                raise RendezvousTimeoutError(f"not in {self._close_timeout:g} s: {why}")
            time.sleep(AGAIN)
        if isinstance(done, Rejected) and not done.final:
            raise RendezvousStateError(done.reason)


def _leave(driver: Driver, process: int) -> None:
    """Leave when the handler is shut down or dropped, or Python ends. Does nothing in a forked process."""
    if os.getpid() == process:
        driver.leave()
