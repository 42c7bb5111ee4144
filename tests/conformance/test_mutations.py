"""The suite notices mistakes: under each of them some case of it fails, in memory and in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest

from everstep_operator.kube.errors import KubeError
from support.conformity.mutations import MUTATIONS
from support.conformity.world import World, memory_world

HERE = Path(__file__).parent
Case = Callable[[World], Awaitable[None]]


@cache
def _modules() -> tuple[ModuleType, ...]:
    return tuple(_load(path) for path in sorted(HERE.glob("test_*.py")) if path.name != Path(__file__).name)


def _load(path: Path) -> ModuleType:
    name = f"conformity_cases_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _cases() -> Iterator[tuple[str, Case]]:
    """Every case of the suite, one for each value it is parametrised with."""
    for module in _modules():
        for name, function in inspect.getmembers(module, inspect.iscoroutinefunction):
            if not name.startswith("test_") or "world" not in inspect.signature(function).parameters:
                continue
            marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
            if not marks:
                yield name, function
                continue
            ((argument, values),) = [mark.args for mark in marks]
            for value in values:
                yield f"{name}[{value}]", partial(_with, function, argument, value)


async def _with(function: Callable[..., Awaitable[None]], argument: str, value: object, world: World) -> None:
    await function(world, **{argument: value})


async def _play(case: Case) -> None:
    async with memory_world() as world:
        await case(world)


def _first_failure() -> str | None:
    """The name of the first case that fails; None if all pass."""
    for name, case in _cases():
        try:
            asyncio.run(_play(case))
        except (AssertionError, pytest.fail.Exception, KubeError):
            return name  # any other exception is a mistake in the mutation, and fails the test
    return None


def test_suite_passes_as_it_is_and_is_large() -> None:
    assert len(list(_cases())) >= 150
    assert _first_failure() is None


@pytest.mark.long_but("generation_counts_status_writes")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistake_makes_the_suite_fail(mutation: str) -> None:
    with MUTATIONS[mutation]():
        assert _first_failure() is not None
