"""The commands that this distribution adds to `everstep`: its entry point in the group `everstep.commands`."""

from __future__ import annotations

from typing import Final

_OF_RUN: Final = ("run", "status", "kill", "start", "scale", "suspend", "resume", "logs")
# By name the module that has it.
COMMANDS: Final = {
    **dict.fromkeys(_OF_RUN, "everstep_local.run.commands"),
    "plan": "everstep_local.plan.command",
    "bench": "everstep_local.bench.command",
}
