"""The commands that this distribution adds to `everstep`: its entry point in the group `everstep.commands`."""

from __future__ import annotations

import typer

from everstep_local.bench import command as bench
from everstep_local.plan import command as plan
from everstep_local.run import commands as run

app = typer.Typer()
app.add_typer(run.app)
app.command("plan")(plan.plan)
app.command("bench")(bench.bench)
# Errors of the user's input, whose text says what is wrong.
EXPECTED = (*run.EXPECTED, *plan.EXPECTED, *bench.EXPECTED)
