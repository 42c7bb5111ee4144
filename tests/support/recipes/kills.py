"""A worker of a recipe is killed, and the run is to end with the bits of the undisturbed one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.recipes.recipes import Ended, differences, disturbed, kill
from support.recipes.recorded import record

CHANGED = "values that a kill changes"


def check_kill(
    name: str,
    folder: Path,
    calm: Ended,
    arguments: Sequence[str],
    steps: tuple[int, int],
    workers: int = 3,
    *,
    through: Sequence[Path] = (),
    seed: str = "",
    figure: str = CHANGED,
    restarts: int = 1,
) -> Ended:
    """Runs the recipe's job in `folder`, and kills one worker in a step between the two `steps`. `seed` chooses the
    step and the worker; it is the recipe's name unless a recipe has several kills. The number of values that differ
    from `calm` is recorded as `figure`; "" records nothing. `restarts`: the most that the job's status may count."""
    hit = disturbed(name, folder, arguments, workers, [kill(seed or name, *steps, workers)], through)
    assert 1 <= hit.status()["restarts"] <= restarts, hit.output
    changed = differences(calm, hit)
    if figure:
        record(name, figure, len(changed), "")
    assert changed == []
    return hit
