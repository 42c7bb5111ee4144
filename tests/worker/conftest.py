"""What the storage and checkpoint tests share: stores on real backends, processes that may die, events as a list."""

import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Events:
    """An `on_event` hook that keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.seen.append((kind, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.seen if name == kind]


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may be a worker of some job itself."""
    for name in [n for n in os.environ if n.startswith("EVERSTEP_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def s3_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own on the real S3 server, whose keys are in the environment."""
    server = request.getfixturevalue("s3_server")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.bucket('everstep-tests')}/{uuid.uuid4().hex}"


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The two stores whose conditional create is real: files and S3."""
    return str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("s3_url")


@pytest.fixture
def in_child() -> Iterator[Callable[..., int]]:
    """Runs a function in a forked process and returns its wait status as `os.waitstatus_to_exitcode` does: an exit
    code, or minus the signal that killed it. What it raises is printed, and is exit code 1."""
    children: list[int] = []

    def start(body: Callable[[], None]) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                body()
                code = 0
            except BaseException:  # the child must not return into pytest
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
        return child

    def run(*bodies: Callable[[], None], timeout: float = 60.0) -> int | list[int]:
        started = [start(body) for body in bodies]
        codes: dict[int, int] = {}
        deadline = time.monotonic() + timeout
        while len(codes) < len(started) and time.monotonic() < deadline:
            for child in started:
                if child not in codes:
                    done, status = os.waitpid(child, os.WNOHANG)
                    if done:
                        codes[child] = os.waitstatus_to_exitcode(status)
                        children.remove(child)
            time.sleep(0.005)
        assert len(codes) == len(started), f"children still run after {timeout} s"
        ordered = [codes[child] for child in started]
        return ordered if len(ordered) > 1 else ordered[0]

    yield run
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
