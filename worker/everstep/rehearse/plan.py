"""Which runs a rehearsal makes of a script, and what is killed in each. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from types import MappingProxyType

# Where in its step a rank dies:
#   begin       the block has begun             backward    the loss is being differentiated, nothing is averaged yet
#   gradients   an optimizer is about to step   optimizer   it has stepped
#   tail        the block has ended             between     the step has been counted
# In an evaluation behind so many steps (`run.evaluate`), at its end if it does not come to the point:
#   forward     behind its first forward pass   evaluate    before its second one
#   evaluated   at its end
EVALUATION = frozenset({"forward", "evaluate", "evaluated"})
POINTS = ("begin", "backward", "gradients", "optimizer", "tail", "between", "forward", "evaluate", "evaluated")
KINDS = ("rank", "all", "size", "store")
# One of each sort: nothing has moved, something, all.
AUTO = ("begin", "backward", "optimizer", "between", "gradients")
EDGE = 2  # steps before the first kill of one rank, and from the last one to the end
LEAST_STEPS = 12
LIVE_STEPS = 3  # behind a change of size in which processes go on, at least
PERIODS = range(2, 7)  # in steps
SETTINGS = "_EVERSTEP_REHEARSAL"  # in the environment of each rank: JSON of what `Player` plays
_KILL = re.compile(r"(\d+(?:\+\d+)*)@(\d+):([a-z]+)")


class PlanError(ValueError):
    """What was asked for cannot be rehearsed; the text says what to write."""


@dataclass(frozen=True)
class Kill:
    """`step`: how many steps are complete when the ranks die, at this point of the next one."""

    ranks: tuple[int, ...]
    step: int
    point: str

    @property
    def name(self) -> str:
        return f"{'+'.join(map(str, self.ranks))}@{self.step}:{self.point}"

    @classmethod
    def parse(cls, text: str) -> Kill:
        found = _KILL.fullmatch(text)
        if found is None or found[3] not in POINTS:
            raise PlanError(f"--at {text}: write RANK@STEP:POINT, as 1@12:backward; points are {', '.join(POINTS)}")
        ranks = {int(rank) for rank in found[1].split("+")}
        return cls(tuple(sorted(ranks)), int(found[2]), found[3])

    @property
    def who(self) -> str:
        *others, last = map(str, self.ranks)
        return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"

    @property
    def was(self) -> str:
        return "were" if len(self.ranks) > 1 else "was"

    def __str__(self) -> str:
        return f"{self.who} killed in step {self.step} ({self.point})"


@dataclass(frozen=True)
class LiveChange:
    """Behind this many steps a rank joins, or the last one leaves, and the other processes go on: `size` ranks."""

    step: int
    size: int


@dataclass(frozen=True)
class Scenario:
    """One run of `steps` steps. `sizes`: its numbers of ranks, one after the other, over the same commits; all but the
    last end when all ranks are killed. `away`: the first step without the stores, and the first that has them again.
    `change`: before the first end. `heap`: behind so many steps, and behind the one before, the heap of each rank is
    read."""

    name: str
    title: str
    sizes: tuple[int, ...]
    steps: int
    kills: tuple[Kill, ...] = ()
    away: tuple[int, int] | None = None
    change: LiveChange | None = None
    heap: tuple[int, ...] = ()

    @property
    def resized(self) -> bool:
        return len(self.sizes) > 1


CALM, AGAIN = "calm", "again"


def _ends(steps: int) -> tuple[int, ...]:
    """Behind how many steps the heap is read, if the run comes so far; how many the script has the first calm run does
    not know. The last of these to which it comes lies behind the middle, and so behind a kill of all."""
    ends, end = [steps], LEAST_STEPS
    while end < steps:
        ends.append(end)
        end = 2 * end - 2
    return tuple(sorted(ends))


def check(ranks: int, steps: int, kinds: tuple[str, ...], at: tuple[Kill, ...] = ()) -> None:
    """Raises `PlanError` for what cannot be rehearsed, before anything runs."""
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise PlanError(f"--kill {','.join(unknown)}: it takes {', '.join(KINDS)}, with commas between them")
    if steps < LEAST_STEPS:
        raise PlanError(f"--steps {steps}: at least {LEAST_STEPS}, so that each kind of loss has steps around it")
    if ranks < 2:
        raise PlanError(f"--ranks {ranks}: at least 2, so that one can be lost")
    last = {kill: steps if kill.point in EVALUATION else steps - 1 for kill in at}
    if bad := [kill for kill in at if kill.step > last[kill] or max(kill.ranks) >= ranks]:
        raise PlanError(f"--at {bad[0].name}: there are steps 0 to {steps - 1} and ranks 0 to {ranks - 1}")


def _apart_in_phase(steps: int) -> tuple[int, ...]:
    """The steps of the kills of one rank: about evenly over the run, and in as many phases of each short period as
    there can be. What a script does in every fifth step, and forgets in the sixth, is lost in some phase alone."""
    gap = (steps - 2 * EDGE) // (len(AUTO) - 1)
    most = min((gap - 1) // 2, max(PERIODS) // 2)
    reach = range(-most, most + 1)
    even = [EDGE + i * (steps - 2 * EDGE) // (len(AUTO) - 1) for i in range(len(AUTO))]
    moves = product(reach, repeat=len(AUTO) - 2)
    places = [(EDGE, *(a + b for a, b in zip(even[1:-1], move, strict=True)), even[-1]) for move in moves]

    def phases(steps: tuple[int, ...]) -> tuple[int, int]:
        moved = sum(abs(a - b) for a, b in zip(steps, even, strict=True))
        return sum(len({step % period for step in steps}) for period in PERIODS), -moved

    return max(places, key=phases)


def _in_evaluation(
    ranks: int, steps: int, others: Collection[Kill], evaluated: Mapping[int, int]
) -> tuple[Kill, ...]:  # fmt: skip
    """A kill of the last rank inside of an evaluation of the middle, and one at the end of another, because rank 0
    prints and writes what comes of it; and behind steps that have no other kill, if there are such. What rank 0 has
    printed since it began a step is not compared where it was killed in that step. Nothing where the script makes no
    evaluation. `evaluated`: see `record.evaluated`."""
    taken = {step for kill in others for step in (kill.step, kill.step + (0 in kill.ranks))}
    places = sorted(evaluated, key=lambda step: (step in taken, step >= steps, abs(step - steps // 2)))
    inside = "evaluate" if places and evaluated[places[0]] > 1 else "forward"
    ends = [step for step in places[1:2] if step not in taken]
    return tuple(Kill((ranks - 1,), *kill) for kill in zip([*places[:1], *ends], (inside, "evaluated"), strict=False))


def _between_commits(steps: int, commits: Collection[int]) -> tuple[int, int] | None:
    """The step of a commit near the middle, and a later one before the next commit: for a live change behind the first,
    and an end of all ranks in the second, after which a start goes on from that commit. None where commits are too
    close to each other."""
    pairs = [
        (first, min(following - 1, max(first + LIVE_STEPS, steps // 2)))
        for first, following in pairwise(sorted({*commits, steps}))
        if following - first > LIVE_STEPS
    ]
    return min(pairs, key=lambda pair: abs(pair[1] - steps // 2), default=None)


def calm(ranks: int, steps: int) -> Scenario:
    """The first run, which says how many steps the script has."""
    return Scenario(CALM, "calm", (ranks,), steps, heap=_ends(steps))


def scenarios(
    ranks: int, steps: int, kinds: tuple[str, ...], at: tuple[Kill, ...] = (),
    evaluated: Mapping[int, int] = MappingProxyType({}), commits: Collection[int] = (),
    heap: tuple[int, ...] = (),
) -> list[Scenario]:  # fmt: skip
    """What is played after the calm run of `steps` steps: the same again, because a script whose two calm runs differ
    can be compared with nothing; then what was asked for. One rank is the last and rank 0 by turns, because scripts do
    on rank 0 what others do not; from the first steps to the last, because state may begin late. `evaluated`: see
    `_in_evaluation`; `commits`: the steps of those of the calm run, if its processes can go on with another number of
    ranks; `heap`: see `Scenario`."""
    found = [Scenario(AGAIN, "calm, once more", (ranks,), steps, heap=heap)]
    everybody, half = tuple(range(ranks)), steps // 2
    if at:
        return [*found, Scenario("at", ", ".join(map(str, at)), (ranks,), steps, at, heap=heap)]
    lost = Kill(everybody, half, "backward")
    if "rank" in kinds:
        places = _apart_in_phase(steps)
        kills = tuple(Kill((0 if i % 2 else ranks - 1,), places[i], point) for i, point in enumerate(AUTO))
        kills = tuple(
            sorted((*kills, *_in_evaluation(ranks, steps, kills, evaluated)), key=lambda kill: (kill.step, kill.point))
        )
        found.append(Scenario("rank", f"one rank killed, {len(kills)} times", (ranks,), steps, kills, heap=heap))
    if "all" in kinds:
        title = "all ranks killed at once, and started again"
        found.append(Scenario("all", title, (ranks,), steps, (lost,), heap=heap))
    if "size" in kinds:
        apart = _between_commits(steps, commits)
        for other, name, change in ((ranks + 1, "more", "leaves"), (ranks - 1, "fewer", "joins")):
            title, live = f"one rank {name}, from the middle", None
            if apart is not None:
                title = f"one rank {change}, then one {name}"
                # To the other size, so that its steps are those of the other run behind its start.
                live = LiveChange(apart[0], 2 * ranks - other)
                lost = Kill(tuple(range(max(ranks, live.size))), apart[1], "backward")
            found.append(Scenario(name, title, (ranks, other), steps, (lost,), change=live))
    if "store" in kinds:
        away = steps // 4, 3 * steps // 4  # a script that saves often enough to be killed saves in between
        title = f"stores away from step {away[0]} to {away[1]}"
        found.append(Scenario("store", title, (ranks,), steps, away=away))
    return found
