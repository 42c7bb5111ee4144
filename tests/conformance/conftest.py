"""One suite, two worlds: every case runs in memory and against a real API server. `--world=memory` leaves one out."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from support.conformity.world import World, memory_world, server_world

WORLDS = ("memory", "apiserver")


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
            item.fixturenames = ["control_plane", "crd", *item.fixturenames]


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncGenerator[World, None]:
    if request.param == "memory":
        async with memory_world() as made:
            yield made
    else:
        async with server_world(request.getfixturevalue("crd")) as made:
            yield made
