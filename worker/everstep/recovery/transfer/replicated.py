"""Brings the members of a new round to one state if each holds all of it; for shards see `sharded`.

Invariant: afterwards all members hold the same state, the newest that any of them has whole, or one from storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from everstep.recovery.digests import state_digest
from everstep.recovery.group.members import Members
from everstep.recovery.transfer import broadcast
from everstep.recovery.transfer.agreement import MemberState, NoState, agree
from everstep.recovery.validity import Validity

log = logging.getLogger("everstep.train")

# Restores the state from storage on all members, if none of them has it. Returns the completed steps; None if nothing
# was committed.
Start = Callable[[], int | None]


def settle(state: Mapping[str, Any], members: Members, step: int, validity: Validity, start: Start) -> tuple[int, str]:
    """Bring all members to the newest whole state. Returns the completed steps, and a text that says what was done.
    Collective. Raises `PeerLost`, `TransferFailed`, and `NoState` if there is no whole state in memory or storage."""
    digest = state_digest(state) if validity > Validity.NONE else 0
    told = members.gather((step, int(validity), digest))
    try:
        agreement = agree([MemberState(s, Validity(q), d) for s, q, d in told])
    except NoState as e:
        log.error("%s; all members go back to the last commit", e)
        if (found := start()) is None:
            raise NoState(f"{e}, and nothing is committed") from e
        return found, "the last commit"
    holder, receivers = agreement.holder, agreement.receivers
    if agreement.diverged:
        log.error(
            "ranks %s hold another state than rank %s after the same step %d; they take its state",
            agreement.diverged, holder, agreement.step,
        )  # fmt: skip
    found = agreement.step
    if holder is None:
        found = start() or 0
        holder, receivers = 0, tuple(range(1, members.world_size))
    if receivers:
        broadcast.send(state, holder, receivers, members)
    return found, f"state from rank {agreement.holder}" if agreement.receivers else ""
