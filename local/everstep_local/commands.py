"""The commands that this distribution adds to `everstep`: its entry point in the group `everstep.commands`."""

from __future__ import annotations

from typing import Final

# By name the module that has it.
COMMANDS: Final = {
    "run": "everstep_local.run.commands",
    "start": "everstep_local.run.commands",
    "ui": "everstep_local.run.commands",
    "demo": "everstep_local.run.demo",
    "plan": "everstep_local.plan.command",
    "render": "everstep_local.plan.render_command",
    "bench": "everstep_local.bench.command",
}
