"""What the agent's tests share: a real etcd for jobs of several agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent.agent_job import Job


@pytest.fixture
def job(etcd_endpoint: str, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`job(script, arguments…)`: its agents are started by the test, and ended with it. None leaves a process."""
    made: list[Job] = []

    def make(*argv: Any, **options: Any) -> Job:
        made.append(Job(tmp_path, etcd_endpoint, *map(str, argv), **options))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()
        one.until(lambda one=one: not one.left_behind(), "processes were left behind", 10)
