"""Puts the helpers of these tests on the path, and builds etcd before the first test that needs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agents import until
from etcd_server import EtcdCluster
from operator_server import OperatorServer
from testcluster import programs  # tests/conftest.py put it on the path


def pytest_collection_finish(session: pytest.Session) -> None:
    """Building takes longer than any test may."""
    if not session.config.option.collectonly and any(
        {"etcd", "etcd_folder"} & set(getattr(item, "fixturenames", ())) for item in session.items
    ):
        programs.etcd()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member, on the loopback. Tests use job names of their own."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), 1)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def etcd_folder(tmp_path: Path) -> Path:
    """Where a test makes an etcd of its own; asking for this builds the program first."""
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
