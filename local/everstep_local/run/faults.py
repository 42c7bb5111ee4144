"""Actions that a run takes when training reaches a step, from `--at STEP:ACTION`. Pure.

An action waits until the world trains in the size and round to which the action before it led, so that a list of
actions is carried out one after the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.jobs.view import View

ACTIONS = "kill=WORKER, kill=all, delete=WORKER, kill-node=NODE, kill-operator, scale=N, suspend or resume"
ALL = "all"  # for `kill`: the processes of all workers, at once
_GRAMMAR = re.compile(
    rf"(\d+):(?:(kill|delete|scale)=(\d+)|(kill)=({ALL})|(kill-node)=([a-z0-9-]+)|(kill-operator|suspend|resume))"
)


class FaultError(ValueError):
    """The text is no fault. The error says what is."""


@dataclass(frozen=True, slots=True)
class Fault:
    step: int
    action: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.step}:{self.action}" + (f"={self.argument}" if self.argument else "")


def parse(text: str) -> Fault:
    """`120:kill=1` and the like."""
    match = _GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise FaultError(f"--at {text}: expected STEP:ACTION, where ACTION is {ACTIONS}")
    step, *groups = match.groups()
    action, argument = [*filter(None, groups), ""][:2]
    return Fault(int(step), action, argument)


def due(faults: tuple[Fault, ...], view: View, round_before: int) -> Fault | None:
    """The first of `faults`, if it is due. `round_before`: the round in which the fault before it was done. A job whose
    processes have roles never has a round, and runs on while a worker is replaced."""
    if not faults:
        return None
    first = faults[0]
    if first.action == "resume":
        return first if view.status == "Suspended" and not view.workers else None
    step = max((row.step for row in view.workers if row.step is not None), default=0)
    trains = view.status == "Running" and (view.round > round_before or view.round == 0)
    return first if trains and step >= first.step else None


def changes_world(fault: Fault, view: View) -> bool:
    """Whether a new round follows, for which the next fault has to wait."""
    match fault.action:
        case "kill-operator":
            return False
        case "scale":
            return int(fault.argument) != view.size
        case "kill-node":
            return any(row.node == fault.argument for row in view.workers)
        case _:
            return True


def target(fault: Fault, view: View) -> str | None:
    """The pod of the fault's worker; None if that worker has no pod now."""
    rows = [row for row in view.workers if str(row.worker) == fault.argument]
    return max(rows, key=lambda row: row.incarnation).pod if rows else None
