"""Workers of a recipe are killed, and the run is to end with the bits of the undisturbed one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from support.recipes.recipes import Ended, differences, disturbed, kill
from support.recipes.recorded import record

CHANGED = "values that a kill changes"
SOON = 2  # steps from a kill to the next one: it strikes the world in the first steps after its recovery
ALL = "all"


def several(seed: str, count: int, workers: int, apart: int) -> list[str]:
    """`count` deaths for `disturbed`, of workers that `seed` chooses, about `apart` steps from each other. Of every
    four, the second one is of another worker and comes right after the recovery from the first one, and the fourth one
    is of all workers."""
    chance, step, found = random.Random(seed), 0, list[str]()
    whom = chance.randrange(workers)
    for number in range(count):
        turn = number % 4
        whom = (whom + chance.randrange(1, workers)) % workers
        step += SOON if turn == 1 else apart // 2 + chance.randrange(apart)
        found.append(f"{step}:kill={ALL if turn == 3 else whom}")
    return found


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
    """Runs the job of a library's own script in `folder`, and kills `one` worker or `all` of them in one step. The job
    ends at the step of `calm`, which its status shows with their number, and of its state `only` is compared. Returns
    the step; the number of values that differ is recorded."""
    one = kill(name, 25, 55)
    at = one if whom == "one" else f"{one.partition(':')[0]}:kill={ALL}"
    hit = disturbed(name, folder, arguments, at=[at])
    status = hit.status()
    assert status["restarts"] >= 1, hit.output
    assert status["step"] == status["total_steps"] == calm.step
    changed = differences(calm, hit, only)
    record(name, f"values that a kill of {'one worker' if whom == 'one' else 'all workers'} changes", len(changed), "")
    assert changed == []
    return calm.step
