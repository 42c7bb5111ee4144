"""What a script's steps do from their last optimizer step on, as far as it was seen. Pure.

Behind the last optimizer step lies the tail. A peer that is lost there is noticed in a collective: everything that the
script does before it is done. So the step is complete if nothing moves behind that collective, in any step. That can be
said only of a step that goes like others that were seen to their end, and only if it is known of everything tracked
where it moves: what has not moved in any step yet may move in this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ENOUGH = 2  # steps that were seen to their end
MOST = 32  # kinds of steps that are told apart


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the step is complete once `redo`, schedules, have moved; or why it is not."""

    redo: tuple[str, ...] = ()
    torn: str | None = None


class Habit:
    """`things`: the names of what is tracked; `schedules` are those that can be moved by hand."""

    def __init__(self, things: Iterable[str], schedules: Iterable[str]) -> None:
        self._unseen = dict.fromkeys(things)  # in order
        self._steps = 0
        self._orders = set[tuple[str, ...]]()
        self._tails = set[tuple[str, ...]]()
        self._last: dict[str, int] = {}  # thing -> the tail's collectives that it has moved behind, at most
        self._each = set(schedules)  # that have moved once in each step

    @property
    def unseen(self) -> tuple[str, ...]:
        """What has not moved yet."""
        return tuple(self._unseen)

    @property
    def longest(self) -> int:
        """The most optimizer steps that a step has made."""
        return max(map(len, self._orders), default=0)

    def moved(self, thing: str) -> None:
        """It was seen to move, somewhere."""
        self._unseen.pop(thing, None)

    def ended(
        self, order: tuple[str, ...], tail: tuple[str, ...], behind: Mapping[str, int], schedules: Mapping[str, int]
    ) -> None:
        """A step has ended well. `order`: the optimizers that stepped; `tail`: the collectives after them; `behind`:
        how many of those each thing has moved behind, if any; `schedules`: how often each has moved."""
        self._steps += 1
        for thing, position in behind.items():
            self._last[thing] = max(self._last.get(thing, 0), position)
            self.moved(thing)
        if not order:
            return  # a scaler has skipped it, for one; a schedule may go without it
        self._each -= {name for name, count in schedules.items() if count != 1}
        for known, new in ((self._orders, order), (self._tails, tail)):
            if len(known) < MOST:
                known.add(new)
        if len(self._orders) >= MOST:
            self._steps = -(10**9)  # it has no habits

    def judge(self, order: tuple[str, ...], tail: tuple[str, ...], schedules: Mapping[str, int]) -> Verdict:
        """A peer was lost when these optimizers had stepped to their end, and the tail's collectives had begun."""
        if self._steps < ENOUGH:
            return Verdict(torn="no step of this process was seen to its end that this one could be compared with")
        if order not in self._orders:
            return Verdict(torn=f"its optimizers had made {_words(order)}, and no step was seen that ends so")
        if any(len(known) > len(order) and known[: len(order)] == order for known in self._orders):
            return Verdict(torn=f"its optimizers had made {_words(order)}, and some steps go on from there")
        if not tail:
            return Verdict(torn="the collective that failed was begun before the optimizer's step")
        if not any(known[: len(tail)] == tail for known in self._tails):
            return Verdict(torn=f"no step was seen with this collective behind the optimizer's step: {tail[-1]}")
        if self._unseen:
            thing = next(iter(self._unseen))
            return Verdict(
                torn=f"{thing} has not moved yet, as far as torch counts: where in a step it does is not known"
            )
        redo = []
        for thing, position in self._last.items():
            if position < len(tail):
                continue
            if thing not in self._each:
                return Verdict(
                    torn=f"{thing} moves behind a collective that follows the optimizer's step: move it before that"
                )
            if schedules.get(thing) == 0:
                redo.append(thing)
        return Verdict(tuple(redo))


def _words(order: tuple[str, ...]) -> str:
    return f"{len(order)} step{'s' * (len(order) != 1)} ({', '.join(order[:4])}{', …' * (len(order) > 4)})"
