"""Ends the process of a test that its own time limit did not end, so that it costs one test and not the lane.

pytest-timeout raises an error in the main thread, once. Whoever catches it (Hypothesis runs the example again; a loop
that waits for its cancelled tasks) can wait for ever after that. A signal handler cannot help there; a thread of
faulthandler's does: it prints every thread's stack and ends the process, which pytest-xdist replaces.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from typing import TextIO

import pytest


class Hung:
    """`slack`: seconds after a test's time limit. `limit`: that of a test which names none."""

    def __init__(self, slack: float, limit: float) -> None:
        self._slack, self._limit = slack, limit
        self._out: TextIO = os.fdopen(os.dup(2), "w")  # pytest takes the real one while a test runs

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        mark = item.get_closest_marker("timeout")
        limit = float(mark.args[0]) if mark is not None and mark.args else self._limit
        faulthandler.dump_traceback_later(limit + self._slack, exit=True, file=self._out)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
