"""Runs several writes at once, up to a bound, each with its own outcome.

Invariants: results come in the order of the calls. A failed call neither stops nor hides the others. At most `limit`
calls run at the same time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Returned(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class Raised:
    error: Exception


CallOutcome: TypeAlias = Returned[T] | Raised


async def run_bounded(calls: Sequence[Callable[[], Awaitable[T]]], limit: int) -> list[CallOutcome[T]]:
    """The outcome of every call. Cancelling this cancels the running calls and starts no others."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    semaphore = asyncio.Semaphore(limit)

    async def run_call(call: Callable[[], Awaitable[T]]) -> CallOutcome[T]:
        async with semaphore:
            try:
                return Returned(await call())
            except Exception as error:
                return Raised(error)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_call(call)) for call in calls]
    return [task.result() for task in tasks]
