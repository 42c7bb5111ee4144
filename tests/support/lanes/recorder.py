"""pytest with a record of what each test came to: `recorder.py RECORD MOST PYTEST-ARGUMENTS…`.

The record is lines of JSON, written as they happen, so that it is there whatever ends the run. Invariant: a test that
was collected and has no line did not run. The run stops once more than MOST failures have different causes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

WHY_LENGTH = 300  # characters


class Recorder:
    """Lives in the process that reports: with xdist the controller, which has every worker's reports."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self._causes: set[str] = set()
        self._session: pytest.Session | None = None

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as record:
            record.write(json.dumps(line) + "\n")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        del node  # all workers collect the same
        self._write(collected=list(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(broken=f"{report.nodeid} could not be collected: {_why(report)}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self._write(broken=f"pytest itself failed: {_last_line(str(excrepr))}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cause = ""
        if report.failed:
            cause = _cause(report)
            self._causes.add(cause)
        self._write(
            test=report.nodeid, when=report.when, outcome=report.outcome, seconds=round(report.duration, 3),
            cause=cause, why=_why(report) if report.failed else "",
        )  # fmt: skip
        if len(self._causes) > self._most and self._session is not None:
            self._stop(self._session, f"more than {self._most} failures")

    @staticmethod
    def _stop(session: pytest.Session, why: str) -> None:
        distributed = session.config.pluginmanager.getplugin("dsession")
        if distributed is None:
            session.shouldstop = why
        elif not distributed.shouldstop:  # xdist's controller does not look at the session's
            distributed.shouldstop = why


def _cause(report: pytest.TestReport) -> str:
    """One for each failure, but all tests whose common fixture failed have one: the fixture's error is kept and raised
    again for each of them."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.when == "setup" and crash is not None:
        return f"{crash.path}:{crash.lineno}: {crash.message}"
    return report.nodeid


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).strip().splitlines()[0][:WHY_LENGTH] if str(crash.message).strip() else ""
    return _last_line(str(report.longrepr))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("E ").strip()[:WHY_LENGTH] if lines else ""


def main() -> int:
    record, most, *arguments = sys.argv[1:]
    sys.path.pop(0)  # this folder, which no test is to find modules in
    return int(pytest.main(arguments, plugins=[Recorder(Path(record), int(most))]))


if __name__ == "__main__":
    sys.exit(main())
