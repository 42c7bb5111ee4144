"""Round stores that tests share. A test that starts an etcd asks for `etcd_program` (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.rendezvous.agents import until
from support.rendezvous.operator_server import OperatorServer


@pytest.fixture
def etcd_folder(etcd_program: Path, tmp_path: Path) -> Path:
    """Where a test makes an etcd of its own; asking for this builds the program first."""
    del etcd_program
    return tmp_path


@pytest.fixture(scope="session")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorServer]:
    """One replica that leads. Tests use jobs of their own."""
    server = OperatorServer(tmp_path_factory.mktemp("operator"))
    replica = server.start()
    until(lambda: server.leads(replica))
    yield server
    server.stop()


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[OperatorServer]:
    """A cluster of a test's own, no replica yet."""
    server = OperatorServer(tmp_path)
    yield server
    server.stop()
