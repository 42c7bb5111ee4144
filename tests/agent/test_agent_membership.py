"""The agent's rendezvous, without the agent."""

from __future__ import annotations

import asyncio

from everstep.agent.decide.events import Charged, Event, NotFormed
from everstep.agent.membership import Membership
from everstep.contract.document import Member, Sizes
from everstep.membership.backends.memory import MemoryStore
from everstep.membership.commands import Charge
from everstep.membership.driver import Driver
from everstep.membership.store import View


class Odd(MemoryStore):
    """A store whose first answer nobody has thought of."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = True

    def read(self) -> View:
        if self.odd:
            self.odd = False
            raise RuntimeError("can't start new thread")
        return super().read()


async def test_a_rendezvous_that_fails_in_a_way_nobody_thought_of_is_told_and_not_waited_for() -> None:
    told: asyncio.Queue[Event] = asyncio.Queue()
    member = Member(0, "a", address="127.0.0.1")
    membership = Membership(Driver(Odd(), member, Sizes(1, 1)), 30.0, told.put_nowait)
    membership.start()
    membership.join(0, 4000, prepared=True)
    async with asyncio.timeout(60):
        assert await told.get() == NotFormed("the rendezvous failed: RuntimeError: can't start new thread")
    await membership.leave()


async def test_a_failure_that_a_store_without_its_document_cannot_count_is_said_to_be_uncounted() -> None:
    """The agent then counts for itself; with no answer it would start a program that fails again for ever."""
    told: asyncio.Queue[Event] = asyncio.Queue()
    member = Member(0, "a", address="127.0.0.1")
    membership = Membership(Driver(MemoryStore(), member, Sizes(1, 1)), 30.0, told.put_nowait)
    membership.start()
    membership.change(Charge("a", 5, "ValueError"))
    async with asyncio.timeout(60):
        assert await told.get() == Charged(None)
    await membership.leave()
