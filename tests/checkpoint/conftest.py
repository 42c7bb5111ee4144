"""What the checkpoint tests share: events as a list, and states that say which step they are of."""

import os
from typing import Any

import pytest
import torch

import everstep
from everstep.storage import ObjectStore


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

    def restored(self, **options: Any) -> int | None:
        """The step that a run restores which then ends in order."""
        checkpointer, step = self.begin(**options)
        checkpointer.close()
        return step


@pytest.fixture
def runs() -> type[Runs]:
    return Runs
