"""One suite, two worlds: every case runs in memory and against a real API server. `--world=memory` leaves one out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from support.conformity.world import World, memory_world, server_world

ROOT = Path(__file__).parents[2]
WORLDS = ("memory", "apiserver")
LIMIT = 30.0  # seconds until a new CRD is served


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--world", choices=WORLDS, default=None, help="run the conformance cases in this world only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--world", default=None)
        marks = {"memory": (), "apiserver": (pytest.mark.apiserver,)}
        worlds = [pytest.param(one, marks=marks[one]) for one in WORLDS if wanted in (None, one)]
        metafunc.parametrize("world", worlds, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        if isinstance(item, pytest.Function) and call is not None and call.params.get("world") == "apiserver":
            # Asked for by name, so that it is built before the first test and started outside the loop. A list of
            # its own: the cases of one function share theirs, and those in memory need no server.
            item.fixturenames = ["control_plane", "serving_plane", *item.fixturenames]


@pytest.fixture(scope="session")
def serving_plane(control_plane: Any) -> Any:
    """The control plane, serving TrainingJobs."""
    path = str(ROOT / "manifests/crd.yaml")
    done = control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", path)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + LIMIT
    while control_plane.kubectl("get", "tjob").returncode != 0:
        assert time.monotonic() < deadline, f"TrainingJobs are not served within {LIMIT:.0f} s"
        time.sleep(0.1)
    return control_plane


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncGenerator[World, None]:
    if request.param == "memory":
        async with memory_world() as made:
            yield made
    else:
        async with server_world(request.getfixturevalue("serving_plane")) as made:
            yield made
