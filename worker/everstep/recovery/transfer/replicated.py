"""Brings the members of a new round to one state if each holds all of it; for shards see `sharded`. The state of a
`ZeroRedundancyOptimizer` alone may be divided among them (`divided_optimizers`).

Invariant: afterwards all members hold the same state, the newest that any of them has whole, or one from storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from everstep.recovery.digests import state_digests
from everstep.recovery.errors import LoopError
from everstep.recovery.group.members import Members
from everstep.recovery.state.gradients import Gradients
from everstep.recovery.transfer import broadcast
from everstep.recovery.transfer.agreement import Agreement, MemberState, NoState, agree
from everstep.recovery.transfer.divided_optimizers import NONE_DIVIDED, DividedOptimizers, Partition, sources
from everstep.recovery.validity import Validity

log = logging.getLogger("everstep.train")

# Restores the state from storage on all members, if none of them has it. Returns the completed steps; None if nothing
# was committed.
Start = Callable[[], int | None]


def synchronize(
    state: Mapping[str, Any],
    members: Members,
    step: int,
    validity: Validity,
    start: Start,
    divided: DividedOptimizers = NONE_DIVIDED,
    made: int = 0,
) -> tuple[int, str]:
    """Bring all members to the newest whole state. Returns the completed steps, and a text that says what was done.
    `made`: see `MemberState`. Collective. Raises `PeerLost`, `TransferFailed`, and `NoState` if there is no whole state
    in memory or storage."""
    digest, parameters = state_digests(state) if validity > Validity.NONE else (0, 0)
    mine = divided.partition
    usable = Validity.TORN if divided.spoiled else validity
    gathered = members.gather((step, int(usable), digest, parameters, made, mine.parts, mine.part))
    states = [MemberState(s, Validity(q), d, p, m) for s, q, d, p, m, _, _ in gathered]
    partitions = [Partition(parts, part) for *_, parts, part in gathered]
    new = Partition(members.world_size, members.rank)
    try:
        agreement = agree(states)
        givers = _givers(agreement, states, partitions) if divided else []
    except NoState as e:
        log.error("%s; all members go back to the last commit", e)
        divided.spoil(new)
        if (committed := start()) is None:
            raise NoState(f"{e}, and nothing is committed") from e
        divided.spoiled = False
        return committed, "the last commit"
    holder, receivers = agreement.holder, agreement.receivers
    if members.rank in (0, *agreement.diverged) and agreement.diverged:
        log.error(
            "ranks %s hold another state than rank %s after the same step %d; they take its state",
            agreement.diverged, holder, agreement.step,
        )  # fmt: skip
    if (
        holder is not None
        and not receivers
        and partitions == [Partition(len(gathered), r) for r in range(len(gathered))]
    ):
        return agreement.step, ""
    # The replicated state goes last: a member that has it has its part of the divided state too.
    with divided.divided(new) as old_states:
        done: int | None = agreement.step
        if holder is None:
            done = start()
            holder, receivers = 0, tuple(range(1, members.world_size))
        if agreement.holder is not None or done is None:
            divided.exchange(old_states, givers, members)
        if receivers:
            broadcast.send(divided.others(state), holder, receivers, members)
    return done or 0, f"state from rank {agreement.holder}" if agreement.receivers else ""


def _givers(agreement: Agreement, states: list[MemberState], partitions: list[Partition]) -> list[int]:
    """The ranks that give the parts of the divided state: members with the agreed state, or rank 0 with what its script
    made. Raises `NoState`."""
    if agreement.holder is None:
        return sources(partitions[:1])
    best = states[agreement.holder]
    return sources([p if s == best else None for s, p in zip(states, partitions, strict=True)])


def take_from(state: Mapping[str, Any], source: int, members: Any, gradients: Gradients) -> None:
    """Bring all members to the state of the member `source`, which has made more optimizer steps in the present step.
    Collective. Raises `PeerLost`, `TransferFailed` and `LoopError`."""
    if DividedOptimizers(state):
        raise LoopError(
            "join(): a ZeroRedundancyOptimizer has stepped in it, of which each rank holds another part, and ranks had "
            "different numbers of inputs. Write optimizer.step() behind the join"
        )
    receivers = tuple(rank for rank in range(members.world_size) if rank != source)
    broadcast.send(state, source, receivers, members)
    gradients.updates = int(members.from_rank(source, str(gradients.updates).encode()))
    gradients.entered = True
