"""What the workers of the elastic example printed, from the logs of a local run."""

from __future__ import annotations

import re
from pathlib import Path

STEP = re.compile(r" step=(\d+) loss=\S+ world=(\d+) pid=(\d+)")


def worker_logs(out: Path) -> dict[str, str]:
    """The log of each pod that there was."""
    return {path.stem: path.read_text() for path in (out / "logs").glob("*.log")}


def taken(logs: dict[str, str]) -> list[tuple[int, ...]]:
    """What rank 0 printed: step, world size, process."""
    return [tuple(map(int, found)) for log in logs.values() for found in STEP.findall(log)]
