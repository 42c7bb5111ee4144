"""Checks that all ranks make the same calls on their run before its first step, in the same order.

If one rank asks for an evaluation, a function of `run.once`, saves or steps, and another does not, it would wait in a
collective that never ends. So the calls are compared as text, before any other collective of the run. This module knows
no process group. Invariant: line numbers of the script are part of the message, but are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest

from everstep.recovery.errors import LoopError

AT_PLACE = "at place {} "  # prefix of calls that only the ranks of this place in a replica make
Gather = Callable[[Sequence[int]], list[tuple[int, ...]]]  # collects the numbers of each rank; collective
_LINE = re.compile(r" \([^()]*:\d+\)$")
_MODEL_RANK = re.compile(AT_PLACE.format(r"\d+"))
_BYTES = 7  # of text in each number of at most 63 bits
_OF_PLACES = (
    ". Modules, optimizers, schedules and scalers may be other ones on each place of a replica, and are the same on "
    "that place of all replicas. Dictionaries, lists, tensors and other objects are tracked on all ranks alike: put "
    "what one place keeps for itself into a buffer of a tracked module"
)


def check(calls: Sequence[str]) -> None:
    """`calls`: by rank, one line for each call. Raises `LoopError` for the first call that differs between ranks."""
    peers: dict[str, int] = {}  # the first rank of each place
    for rank, own in enumerate(calls):
        model_rank = next((at[0] for line in own.splitlines() if (at := _MODEL_RANK.match(line))), "")
        for peer, of_place in ((0, False), (peers.setdefault(model_rank, rank), True)):
            if (differing := _difference(_lines(calls[peer], of_place), _lines(own, of_place))) is not None:
                first, other = differing
                raise LoopError(
                    f"rank {peer}'s script made {first}, and rank {rank}'s {other}, before its first step. "
                    "Each process must make the same ones in the same order, a process that comes later too"
                    + (_OF_PLACES if model_rank else "")
                )


def check_gathered(mine: str, gather: Gather) -> None:
    """`check` the calls of all ranks. Collective."""
    check(gather_texts(mine, gather))


def gather_texts(mine: str, gather: Gather) -> list[str]:
    """By rank. Collective."""
    data = mine.encode()
    sizes = [size for (size,) in gather((len(data),))]
    length = -(-max(sizes) // _BYTES) * _BYTES
    padded = data.ljust(length, b"\0")
    numbers = [int.from_bytes(padded[at : at + _BYTES], "big") for at in range(0, length, _BYTES)]
    texts = [b"".join(number.to_bytes(_BYTES, "big") for number in row) for row in gather(numbers)]
    return [text[:size].decode() for text, size in zip(texts, sizes, strict=True)]


def _lines(text: str, of_place: bool) -> list[str]:
    return [line for line in text.splitlines() if (_MODEL_RANK.match(line) is not None) is of_place]


def _difference(some: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    for first, other in zip_longest(some, others, fillvalue="nothing in its place"):
        if _LINE.sub("", first) != _LINE.sub("", other):
            return first, other
    return None
