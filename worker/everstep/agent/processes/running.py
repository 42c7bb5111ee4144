"""The agent's record of a training process, and a summary of its processes' reports on a new round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.agent.decide.stall import Finding, Watch
from everstep.agent.processes.output import Files
from everstep.contract.calls import StepStatus


@dataclass(slots=True)
class Running:
    """`speaks`: it hears of rounds, and recovers. `listens`: it hears requests alone. `joined`: it has trained in a
    round. `ended`: its run is complete, or the interpreter ends in order. `answer`: its answer when it was last
    asked where it is. `stall`: the last finding, and its time."""

    slot: int
    rank: int
    files: Files
    watch: Watch
    speaks: bool = False
    listens: bool = False
    joined: bool = False
    ended: bool = False
    answer: StepStatus | None = None
    stall: tuple[Finding, float] = field(default=(Finding.GOES_ON, 0.0))


class Settling:
    """Combines the reports of all local processes on a round into one line."""

    def __init__(self) -> None:
        self._round = 0
        self._reports: dict[int, tuple[float, float]] = {}  # by slot

    def joined(self, slot: int, message: Mapping[str, Any], processes: int) -> str | None:
        """The line, once the last of them trains in the round; the slowest counts. Raises KeyError, ValueError."""
        number, step = int(message["round"]), int(message["step"])
        if number != self._round:
            self._round, self._reports = number, {}
        self._reports[slot] = float(message.get("formed", 0.0)), float(message.get("settled", 0.0))
        if len(self._reports) < processes:
            return None
        formed, synced = (max(times) * 1e3 for times in zip(*self._reports.values(), strict=True))
        how = f", {message['how']}" if message.get("how") else ""
        return f"round {number}: step {step}, formed in {formed:.0f} ms, in sync in {synced:.0f} ms{how}"
