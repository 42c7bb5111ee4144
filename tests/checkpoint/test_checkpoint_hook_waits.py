"""A hook runs on the thread that writes: it is refused to wait there for what that thread does. And what is closed is
not held."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.checkpoint import CheckpointError, SaveHandle
from everstep.checkpoint.handle import Committed
from everstep.storage import MemoryStore


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "waits",
    [
        lambda checkpointer, _: checkpointer.wait(),
        lambda checkpointer, _: checkpointer.close(),
        lambda _, handles: handles[-1].wait(),
    ],
    ids=["wait", "close", "handle"],
)
def test_hook_that_waits_for_the_save_that_tells_it_is_refused(waits: Callable[..., Any], runs: Any) -> None:
    handles: list[SaveHandle] = []
    given = threading.Event()
    heard: list[CheckpointError] = []

    def on_event(kind: str, **_: Any) -> None:
        if kind == "committed":
            assert given.wait(30)  # until `save` has returned its handle
            with pytest.raises(CheckpointError) as raised:
                waits(checkpointer, handles)
            heard.append(raised.value)

    checkpointer = everstep.Checkpointer(store=MemoryStore(), on_event=on_event)
    checkpointer.restore(runs.state())
    handles.append(checkpointer.save(1, runs.state(1)))
    given.set()
    assert isinstance(handles[0].wait(30), Committed)
    assert "wait for itself. Note the event there" in str(heard[0])


def test_closed_checkpointer_is_not_held(tmp_path: Path, runs: Any) -> None:
    checkpointer = everstep.Checkpointer(tmp_path, on_event=lambda *_, **__: None)
    checkpointer.restore(runs.state())
    checkpointer.save(1, runs.state(1)).wait(30)
    checkpointer.close()
    held = weakref.ref(checkpointer)
    del checkpointer
    gc.collect()
    assert held() is None
