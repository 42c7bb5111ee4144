"""Handles of collectives that have begun: what `hvd.poll` and `hvd.synchronize` take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from everstep.recovery.errors import LoopError
from everstep_horovod.errors import HorovodInternalError


@contextmanager
def failures() -> Iterator[None]:
    """A context in which the errors of torch.distributed become Horovod's."""
    try:
        yield
    except (HorovodInternalError, LoopError):
        raise
    except RuntimeError as e:
        # The text stays: an agent tells by it that a peer was lost, and charges nobody.
        raise HorovodInternalError(f"a collective has failed ({type(e).__name__}: {e})") from e


class Handle:
    """One collective, or several. `finish` makes the result, once they are over."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works, self._finish = works, finish
        self._over = False
        self._result: Any = None

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._over or all(work.is_completed() for work in self._works)

    def result(self) -> Any:
        """Wait, and return the result. Raises `HorovodInternalError`."""
        if not self._over:
            with failures():
                for work in self._works:
                    work.wait()
            self._result, self._over = self._finish(), True
            self._works = ()
        return self._result


class AsWork:
    """A handle in the place of a work, so that a handle can wait for others."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def is_completed(self) -> bool:
        return self._handle.done()

    def wait(self) -> None:
        self._handle.result()


def together(handles: Sequence[Handle]) -> Handle:
    """Several handles as one, whose result is the list of theirs."""
    return Handle([AsWork(handle) for handle in handles], lambda: [handle.result() for handle in handles])


def poll(handle: Handle) -> bool:
    """Whether the collective is over, so that `synchronize` would not wait."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for the collective, and return its result. Raises `HorovodInternalError` if a peer was lost."""
    return handle.result()
