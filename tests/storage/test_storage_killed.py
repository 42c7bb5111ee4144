"""Cases 68 and 70: killed at every request of a streaming write, on every server: the object is whole, or is not there.

What a killed writer leaves behind is never visible, does not keep the name from the next writer, and can be removed.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest

from everstep.storage import ObjectStore
from everstep.testing import Die, DieAfter, Fault, FaultStore, Tear
from everstep.testing.contract import pattern, stream

PART = 5 * 2**20
DATA = pattern(2 * PART + 9)
CALLS = ["start a", "part a#0", "part a#1", "part a#2", "commit a"]


def killed(store: ObjectStore, faults: Mapping[int, Fault]) -> bool:
    """Whether a process that writes under these faults ends by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            stream(FaultStore(store, faults), "a", DATA, PART)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the writer hangs")


@pytest.mark.long
@pytest.mark.timeout(300)
class Killed:
    """The scenario; a subclass names the fixture of its server."""

    server: ClassVar[str]
    sweeps: ClassVar[bool] = False

    def test_writer_killed_at_every_request_leaves_the_whole_object_or_none(self, place: Callable) -> None:
        counted = FaultStore(place(self.server).open())
        stream(counted, "a", DATA, PART)
        assert counted.calls == CALLS
        for fault, numbers in ((Die(), range(5)), (Tear(), (1,)), (DieAfter(), (3, 4))):
            for number in numbers:
                there = place(self.server)
                assert killed(there.open(), {number: fault}), f"{fault} at {CALLS[number]}"
                check(there.open(), committed=number == 4 and fault == DieAfter(), sweeps=self.sweeps)


@pytest.mark.usefixtures("s3_server")
class TestS3(Killed):
    server = "s3_server"
    sweeps = True


@pytest.mark.usefixtures("careless_s3_server")
class TestS3ThatIgnoresConditions(Killed):
    server = "careless_s3_server"


@pytest.mark.usefixtures("gcs_server")
class TestGcs(Killed):
    server = "gcs_server"


@pytest.mark.usefixtures("azure_server")
class TestAzure(Killed):
    server = "azure_server"


def check(store: ObjectStore, *, committed: bool, sweeps: bool) -> None:
    assert [i.name for i in store.list()] == (["a"] if committed else [])
    if committed:
        assert store.get("a") == DATA
        return
    assert store.sweep_uploads(-60) <= int(sweeps)
    assert store.sweep_uploads(-60) == 0
    stream(store, "a", DATA, PART)
    assert store.get("a") == DATA
