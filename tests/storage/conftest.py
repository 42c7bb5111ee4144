"""What the storage tests share: a prefix of its own on each server, reached as a user would reach it."""

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from everstep.storage import ObjectStore, open_store

PART = 5 * 2**20  # the least that S3 takes
BUCKET = "everstep-tests"


@dataclass(frozen=True, slots=True)
class Place:
    """An empty folder on a server. `open` gives a store of it."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    single_committer: bool = False

    def open(self, part_size: int | None = PART) -> ObjectStore:
        return open_store(self.url, self.options, single_committer=self.single_committer, part_size=part_size)


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may be a worker of some job itself."""
    for name in [n for n in os.environ if n.startswith(("EVERSTEP_", "AWS_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Place]:
    """By the name of a server's fixture, a place of its own on it; an S3 server's keys go to the environment."""

    def on(server_fixture: str) -> Place:
        server = request.getfixturevalue(server_fixture)
        folder = f"{server.bucket(BUCKET)}/{uuid.uuid4().hex}"
        match server_fixture:
            case "s3_server" | "careless_s3_server":
                for name, value in (server.env if isinstance(server.env, Mapping) else server.env()).items():
                    monkeypatch.setenv(name, value)
                return Place(f"s3://{folder}", single_committer=server_fixture != "s3_server")
            case "gcs_server":
                return Place(f"gs://{folder}", server.options)
            case _:
                return Place(f"az://{folder}", server.options)

    return on
