"""What a save costs the training beside it, blocked or not: the same steps with saves and without.

One rank multiplies matrices. With all cores in use, everything that a save does is taken from the steps: its cost is
the added wall time × cores, compared with the CPU seconds of a bare write of the same bytes (through the page cache and
synced). With steps that use all cores but one, the save should run on the spare one: then the figure is how much longer
a step takes while a save is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Run:
    """One series of steps. `wall` in seconds; `saved` is how many saves were made durable; `slow` and `plain` are the
    medians of a step's seconds while a save was in flight and while none was; the same if no step was beside one."""

    wall: float
    saved: int
    slow: float
    plain: float


class Training:
    """Steps of a few milliseconds on `threads` threads."""

    def __init__(self) -> None:
        self._a, self._b = torch.rand(WIDTH, WIDTH), torch.rand(WIDTH, WIDTH)
        self._c = torch.empty(WIDTH, WIDTH)
        self._seconds: dict[int, float] = {}  # of a step, by its threads

    def run(
        self, save: Callable[[], Callable[[], bool]] | None, seconds: float, threads: int, saves: int
    ) -> Run | None:
        """`saves` times: as many steps as take `seconds` when nothing else runs, after a save if there is one.

        `save` starts one and returns what says that it is done. The steps are counted, not timed: the work is the same
        with saves and without. None if a save took longer than its steps.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            steps = self._count(seconds)
            slow, plain, saved = list[float](), list[float](), 0
            began = time.perf_counter()
            for _ in range(saves):
                done = save() if save else lambda: True
                for _ in range(steps):
                    free = done()
                    start = time.perf_counter()
                    torch.mm(self._a, self._b, out=self._c)
                    (plain if free else slow).append(time.perf_counter() - start)
                if not done():
                    while not done():
                        time.sleep(0.01)
                    return None
                saved += save is not None
            wall = time.perf_counter() - began
        finally:
            torch.set_num_threads(before)
        return Run(wall, saved, median(slow or plain), median(plain)) if plain else None

    def _count(self, seconds: float) -> int:
        """How many steps take so long; the same in all series."""
        threads = torch.get_num_threads()
        if threads not in self._seconds:
            took = []
            for _ in range(20):
                start = time.perf_counter()
                torch.mm(self._a, self._b, out=self._c)
                took.append(time.perf_counter() - start)
            self._seconds[threads] = median(took)
        return max(1, int(seconds / self._seconds[threads]))
