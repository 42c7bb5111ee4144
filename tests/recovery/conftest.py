"""What the recovery tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`play(wanted, seed=…, script=…)`: the agents of a job of that script; ended with the test."""
    from support.recovery.recovery_agents import Agents  # noqa: PLC0415  imports torch

    started: list[Agents] = []

    def start(wanted: Any, seed: int = 0, **script: Any) -> Agents:
        agents = Agents(tmp_path_factory.mktemp("r"), wanted, seed, **script)
        started.append(agents)
        return agents

    yield start
    for agents in started:
        agents.__exit__()


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    from support.recovery import lonely_mesh  # noqa: PLC0415  imports torch

    with lonely_mesh.world_of_one():
        yield
