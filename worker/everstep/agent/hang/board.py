"""Shares between agents in which collective each rank waits, through the process-group store of their round.

That store exists anyway, every agent reaches it, and it ends with the round. The agent has no torch, so it sends its
calls through its process that hosts stores. The board is used only when processes have stalled. Invariant: no call here
raises; a call that fails gives an empty answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from everstep.agent.hang.mismatch import Seen, decode
from everstep.agent.processes.control_socket import StoresUnavailable
from everstep.membership.world_state import Round

log = logging.getLogger(__name__)

AT_ONCE = 256  # ranks in one answer, which must fit into one line of the agent's socket


class Asks(Protocol):
    async def ask_stores(self, **message: Any) -> Any: ...


class Board:
    def __init__(self, stores: Asks) -> None:
        self._stores = stores

    async def post(self, round_: Round, rank: int, seen: Seen) -> None:
        await self._ask(round_, "post", key=_key(round_, rank), value=seen.encode().decode())

    async def withdraw(self, round_: Round, rank: int) -> None:
        await self._ask(round_, "withdraw", key=_key(round_, rank))

    async def read(self, round_: Round, ranks: Iterable[int], *, some: bool = False) -> dict[int, Seen]:
        """The posts of these ranks. Empty unless all of them have posted; with `some`, the posts that exist."""
        ranks = list(ranks)
        found: dict[int, Seen] = {}
        for i in range(0, len(ranks), AT_ONCE):
            part = ranks[i : i + AT_ONCE]
            said = await self._ask(round_, "read", keys=[_key(round_, rank) for rank in part], some=some)
            for rank, value in zip(part, said.get("values", ()), strict=False):
                if value is not None:
                    try:
                        found[rank] = decode(value.encode())
                    except ValueError as e:
                        log.warning("rank %d: %s", rank, e)
            if not some and len(found) < i + len(part):
                return {}
        return found

    async def _ask(self, round_: Round, kind: str, **message: Any) -> Any:
        first = round_.members[0]
        try:
            answer = await self._stores.ask_stores(kind=kind, host=first.address, port=first.store_port, **message)
        except StoresUnavailable as e:
            log.warning("%s", e)
            return {}
        if "error" in answer:
            log.info("round %d: its store does not answer: %s", round_.number, answer["error"])
        return answer


def _key(round_: Round, rank: int) -> str:
    return f"everstep/waits/{round_.number}/{rank}"
