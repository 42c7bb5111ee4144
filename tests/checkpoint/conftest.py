"""What the checkpoint tests share: events as a list, and states that say which step they are of."""

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from aiobotocore.session import AioSession

import everstep
from everstep.storage import ObjectStore, open_store


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may be a worker of some job itself."""
    for name in [n for n in os.environ if n.startswith("EVERSTEP_")]:
        monkeypatch.delenv(name)


class Runs:
    """Runs of training on one store, in this process: each saves and restores a state that names its step."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    @staticmethod
    def state(step: int = 0) -> dict[str, Any]:
        return {"w": torch.full((300,), float(step)), "step": step}

    def begin(self, **options: Any) -> tuple[everstep.Checkpointer, int | None]:
        """A run that has restored, and what it restored. It dies when the test forgets it: nothing tells the store."""
        options.setdefault("on_event", lambda kind, **_: None)
        checkpointer = everstep.Checkpointer(store=self.store, **options)
        into = self.state()
        step = checkpointer.restore(into)
        assert into["step"] == (step or 0)
        assert set(into["w"].tolist()) == {float(step or 0)}
        return checkpointer, step

    def save(self, *steps: int, **options: Any) -> None:
        """A run that saves these steps and ends in order."""
        checkpointer, _ = self.begin(**options)
        with checkpointer:
            for step in steps:
                checkpointer.save(step, self.state(step)).wait(30)
                checkpointer.wait(30)

    @staticmethod
    def settle(checkpointer: everstep.Checkpointer) -> None:
        """Wait until the clean-up after the last commit is over too: a save has ended before it."""
        over = threading.Event()
        checkpointer._writer.later(over.set)
        assert over.wait(30)

    def restored(self, **options: Any) -> int | None:
        """The step that a run restores which then ends in order."""
        checkpointer, step = self.begin(**options)
        checkpointer.close()
        return step


@pytest.fixture
def runs() -> type[Runs]:
    return Runs


@pytest.fixture
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], Callable[..., ObjectStore]]:
    """By "local" or the name of a server's fixture: a function that opens stores on it, each name a folder of its own,
    with parts so small that a test's state has several."""
    run = uuid.uuid4().hex

    def on(where: str) -> Callable[..., ObjectStore]:
        part = 5 * 2**20  # the least that S3 takes
        if where == "local":
            return lambda name: open_store(str(tmp_path / name), part_size=2**20)
        server = request.getfixturevalue(where)
        folder = f"{server.bucket('everstep-tests')}/{run}"
        if where in ("s3_server", "careless_s3_server"):
            for name, value in (server.env if isinstance(server.env, Mapping) else server.env()).items():
                monkeypatch.setenv(name, value)
            single = where == "careless_s3_server"
            options = {"session": AioSession()}  # botocore reads its service models once instead of once a store
            return lambda name: open_store(f"s3://{folder}/{name}", options, single_committer=single, part_size=part)
        scheme = {"gcs_server": "gs", "azure_server": "az"}[where]
        return lambda name: open_store(f"{scheme}://{folder}/{name}", server.options, part_size=part)

    return on
