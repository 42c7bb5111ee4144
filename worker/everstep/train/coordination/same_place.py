"""Checks that all ranks are at the same place of the loop over epochs.

A rank that evaluates while the others begin to train waits for them in a collective of its own, and they for it: a hang
watch would find that after a minute, and cannot name the line that is wrong. So all ranks first compare where they are.
"""

from __future__ import annotations

import zlib
from itertools import pairwise

from everstep.recovery.errors import LoopError
from everstep.recovery.forming.same_calls import Gather, gather_texts


def check(location: str, call: str, gather: Gather) -> None:
    """`location`: where this rank is in the loop, as a text. `call`: the script's call, with its line. Raises
    `LoopError` on all ranks if their locations differ. Collective."""
    hashes = gather((zlib.crc32(location.encode()),))
    odd = next((rank for rank, (left, right) in enumerate(pairwise(hashes), 1) if left != right), None)
    if odd is None:
        return
    calls = gather_texts(call, gather)
    raise LoopError(
        f"rank {odd - 1} is at {calls[odd - 1]}, and rank {odd} at {calls[odd]}: each would wait for the other. All "
        "ranks make the same calls of run.evaluate(fn), run.train(fn) and run.steps() in each epoch: take away the "
        "condition that only some ranks meet, or let fn itself ask for run.rank"
    )
