"""A training process, as the agent that forked it keeps it in mind."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.agent.hang import Found, Watch, Where
from everstep.agent.output import Files


@dataclass(slots=True)
class Running:
    """`said`: where it is, since it was asked last. `stall`: what it was found to do, and since when."""

    slot: int
    rank: int
    files: Files
    watch: Watch
    speaks: bool = False
    said: Where | None = None
    stall: tuple[Found, float] = field(default=(Found.GOES_ON, 0.0))
