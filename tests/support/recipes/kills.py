"""Workers of a recipe are killed, and the run is to end with the bits of the undisturbed one."""

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


def check_library_kill(
    name: str, folder: Path, calm: Ended, arguments: Sequence[str], whom: str, only: Sequence[str] = ()
) -> int:
    """Runs the job of a library's own script in `folder`, and kills `one` worker or `all` of three in one step. The job
    ends at the step of `calm`, which its status shows with their number, and of its state `only` is compared. Returns
    the step; the number of values that differ is recorded."""
    one = kill(name, 25, 55)
    at = [one] if whom == "one" else [f"{one.partition(':')[0]}:kill={worker}" for worker in range(3)]
    hit = disturbed(name, folder, arguments, at=at)
    status = hit.status()
    assert status["restarts"] >= 1, hit.output
    assert status["step"] == status["total_steps"] == calm.step
    changed = differences(calm, hit, only)
    record(name, f"values that a kill of {'one worker' if whom == 'one' else 'all workers'} changes", len(changed), "")
    assert changed == []
    return calm.step
