"""Checks that all ranks are at the same place of the loop over epochs.

A rank that evaluates while the others begin to train waits for them in a collective of its own, and they for it: a hang
watch would find that after a minute, and cannot name the line that is wrong. So all ranks meet at each such place.
"""

from __future__ import annotations

import zlib
from itertools import pairwise

from everstep.recovery.errors import LoopError
from everstep.recovery.forming.same_calls import Gather, gather_texts


def meet(place: str, call: str, gather: Gather) -> None:
    """`place`: that of the loop, the same text on all ranks. `call`: the script's call, with its line. Raises
    `LoopError` on all ranks if they are not at one place. Collective."""
    told = gather((zlib.crc32(place.encode()),))
    odd = next((rank for rank, (one, other) in enumerate(pairwise(told), 1) if one != other), None)
    if odd is None:
        return
    said = gather_texts(call, gather)
    raise LoopError(
        f"rank {odd - 1} is at {said[odd - 1]}, and rank {odd} at {said[odd]}: each would wait for the other. All "
        "ranks make the same calls of run.evaluate(fn), run.train(fn) and run.steps() in each epoch: take away the "
        "condition that only some ranks meet, or let fn itself ask for run.rank"
    )
