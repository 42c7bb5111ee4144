"""Compares the collectives in which ranks wait for each other, and finds ranks that are in another one. Pure.

If all ranks of a round wait and none computes, they will wait for ever. There are two causes. Either their programs
have called collectives that do not match (a rank skipped one, or shapes differ); a retry would fail in the same way. Or
they have called the same ones, and data was lost on the way; a retry helps. Some may wait in a later one then: the root
of a broadcast goes on when its data is sent.

Invariant: only properties that must be equal on all ranks are compared, so each reported mismatch is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.contract.calls import IN_GROUP, NO_MATCH, POINT, Call, read_row, read_rows, row, rows

MAX_BYTES = 4096
MAX_AT = 120
MAX_GROUPS = 4  # of ranks that a text lists separately
MAX_RANGES = 6  # of ranks in one group


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one rank. `call`: its program's collective that waits; None: it has come to the end of its step.
    `recent`: its newest collectives, oldest first. `at`: its place in the script, or empty. `waits`: whether it still
    waits."""

    call: Call | None
    recent: tuple[Call, ...] = ()
    at: str = ""
    waits: bool = True

    @property
    def begun(self) -> int:
        """How many collectives its program has begun in this round."""
        return self.recent[-1].number if self.recent else 0

    def encode(self) -> bytes:
        body = {"call": row(self.call), "recent": rows(self.recent), "at": self.at[:MAX_AT], "waits": self.waits}
        return json.dumps(body, separators=(",", ":")).encode()


def decode(data: bytes) -> Seen:
    """Raises ValueError."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, at most {MAX_BYTES} are expected")
    body = json.loads(data)
    try:
        return Seen(read_row(body["call"]), read_rows(body["recent"]), str(body["at"])[:MAX_AT], bool(body["waits"]))
    except (KeyError, TypeError) as e:
        raise ValueError(f"what a rank says of itself cannot be read: {e}") from e


@dataclass(frozen=True, slots=True)
class Verdict:
    """`odd`: the ranks that are not in the collective of most others; empty if all are in one. `why`: one line."""

    odd: tuple[int, ...]
    why: str


def compare(seen: Mapping[int, Seen]) -> Verdict:
    """Compare all ranks of a round, each of which waits."""
    groups: dict[Call | None, list[int]] = {}
    for rank in sorted(seen):
        groups.setdefault(seen[rank].call, []).append(rank)
    if len(groups) == 1:
        line = _line(sorted(seen), seen, numbers=_ambiguous(groups))
        return Verdict((), f"{line}, and nothing arrives: no rank computes, and none is elsewhere")
    verdict = _differ(groups.values(), seen, numbers=_ambiguous(groups))
    first = min((call for call in groups if call is not None), key=lambda call: call.number)
    if all(state.call == first or first in state.recent for state in seen.values()):
        why = "all have called the one that some still wait in"
    elif any(call is not None and call.what.endswith(IN_GROUP) for call in groups):
        # Collectives of smaller groups differ between ranks even in a correct program. Each rank may be in the right
        # one, and data may have been lost on the way.
        why = "they are in groups of their own"
    elif any(call is not None and call.what.startswith(POINT) for call in groups):
        # A sender goes on when the network has its data, to any later collective. The data may have been lost.
        why = "some wait for a message of one other rank"
    else:
        return verdict
    return Verdict((), f"{verdict.why.removeprefix(NO_MATCH)}; nothing arrives: no rank computes, and {why}")


def clash(rank: int, ended: Seen, others: Mapping[int, Seen]) -> Verdict | None:
    """The mismatch between the newest collective of `rank`, in which it was aborted, and the other ranks' collectives
    of the same number. None if no mismatch is known."""
    if not ended.recent:
        return None
    last = ended.recent[-1]
    calls = {other: call for other, s in others.items() for call in s.recent if call.number == last.number}
    if not calls or all(call.what == last.what for call in calls.values()):
        return None
    seen = {rank: Seen(last, ended.recent, ended.at)}
    seen |= {other: Seen(call, others[other].recent, others[other].at) for other, call in calls.items()}
    groups: dict[str, list[int]] = {}
    for member in sorted(seen):
        call = seen[member].call
        assert call is not None
        groups.setdefault(call.what, []).append(member)
    return _differ(groups.values(), seen, numbers=False)


def _differ(groups: Iterable[list[int]], seen: Mapping[int, Seen], *, numbers: bool) -> Verdict:
    """The groups, smallest first; the last one is not odd. Of equal groups, the one with the lowest rank comes last."""
    ordered = sorted(groups, key=lambda ranks: (len(ranks), -ranks[0]))
    odd = tuple(sorted(rank for ranks in ordered[:-1] for rank in ranks))
    lines = [_line(ranks, seen, numbers=numbers) for ranks in ordered]
    return Verdict(odd, NO_MATCH + _listed(lines))


def _ambiguous(groups: Mapping[Call | None, list[int]]) -> bool:
    """Whether the number of a call is needed to tell the groups apart."""
    return len({call.what if call is not None else None for call in groups}) < len(groups) or None in groups


def _line(ranks: Sequence[int], seen: Mapping[int, Seen], *, numbers: bool) -> str:
    first = seen[ranks[0]]
    waits = "waits" if len(ranks) == 1 else "wait"
    if first.call is None:
        count = f", after {first.begun} collectives in this round" if numbers else ""
        return f"{ranks_in_words(ranks)} {waits} at the end of the step{first.at}{count}"
    count = f", the {_ordinal(first.call.number)} in this round" if numbers else ""
    return f"{ranks_in_words(ranks)} {waits} in {first.call.what}{first.at}{count}"


def _ordinal(number: int) -> str:
    tail = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{tail}"


def _listed(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - MAX_GROUPS} groups more" if len(lines) > MAX_GROUPS else ""
    return "; ".join([*lines[: MAX_GROUPS - 1], lines[-1]] if more else lines) + more


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0 and 1`, `ranks 0-6 and 9`; at most `MAX_RANGES` of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    parts: list[str] = []
    for bounds in ranges:
        near = len(bounds) == 2 and bounds[1] == bounds[0] + 1
        parts += [str(r) for r in bounds] if near else ["-".join(str(r) for r in bounds)]
    if len(parts) > MAX_RANGES:
        parts = [*parts[:MAX_RANGES], "others"]
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f"ranks {parts[0]}"
