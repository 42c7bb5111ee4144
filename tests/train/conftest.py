"""Runs the training script as a user does: under `python`, or under stock `torchrun`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from training_run import Start, Started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(ranks, *arguments)`: 0 ranks is plain `python`. What still runs at the end is killed."""
    made: list[Started] = []

    def begin(ranks: int, *arguments: object, **environment: str) -> Started:
        run = Started(ranks, [str(a) for a in arguments], tmp_path / f"run-{len(made)}.txt", environment)
        made.append(run)
        return run

    yield begin
    for run in made:
        run.kill()
