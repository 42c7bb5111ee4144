"""What the storage and checkpoint tests share: stores on real backends, processes that may die, events as a list."""

import os
import uuid
from pathlib import Path

import pytest


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
