"""An agent as its pure machine sees it: events in, instructions out."""

from __future__ import annotations

import signal
from typing import Any

from everstep.agent.decide import events as e
from everstep.agent.decide.events import Fault
from everstep.agent.decide.machine import decide
from everstep.agent.decide.state import Config, begin, started
from everstep.contract.document import Member, Setback
from everstep.membership.world_state import Round

KILL = signal.SIGKILL


def round_of(number: int, *names: str, rank: int = 0) -> Round:
    return Round(number, rank, tuple(Member(i, name, address="h", store_port=9) for i, name in enumerate(names)))


class Play:
    """An agent with one process or more, and what it was told to do last."""

    def __init__(self, processes: int = 1, **config: Any) -> None:
        self.state = begin(Config("a", processes, **config))
        self.told: tuple[e.Instruction, ...] = ()
        self._pid = 100

    def take(self, event: e.Event) -> tuple[e.Instruction, ...]:
        self.state, self.told = decide(self.state, event)
        for instruction in self.told:
            if isinstance(instruction, e.Fork):
                for slot in instruction.slots:
                    self._pid += 1
                    self.state = started(self.state, slot, self._pid)
        return self.told

    def pid(self, slot: int = 0) -> int:
        return self.state.slots[slot].pid

    def form(self, number: int, *names: str, keeps: bool = False, history: tuple[Setback, ...] = ()) -> Any:
        return self.take(e.Formed(round_of(number, *names), keeps, history))

    def exits(self, slot: int, code: int, fault: Fault = Fault.OUTSIDE, why: str = "x") -> Any:
        return self.take(e.Exited(slot, self.pid(slot), code, fault, why))

    def speak(self, number: int, step: int = 5) -> None:
        """All processes say hello, are ready and train in the round from this step on."""
        for slot in range(len(self.state.slots)):
            self.take(e.Hello(slot, self.pid(slot)))
        for slot in range(len(self.state.slots)):
            self.take(e.Ready(slot, self.pid(slot)))
        for slot in range(len(self.state.slots)):
            self.take(e.Trains(slot, self.pid(slot), number, step))


def plain(processes: int = 2, **config: Any) -> Play:
    """An agent whose processes do not speak, in round 1 with another."""
    play = Play(processes, **config)
    play.take(e.Began(False))
    play.form(1, "a", "b")
    return play


def keeping(processes: int = 1, **config: Any) -> Play:
    """An agent whose processes speak, in round 1 with two others."""
    play = plain(processes, **config)
    play.form(1, "a", "b", "c")
    play.speak(1)
    return play


def kinds(told: tuple[e.Instruction, ...]) -> list[str]:
    return [type(instruction).__name__ for instruction in told]
