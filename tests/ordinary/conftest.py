"""What the table of ordinary scripts shares: a real etcd for its agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.rendezvous.etcd_server import EtcdCluster


@pytest.fixture(scope="session")
def endpoint(etcd_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an etcd that all rows share: each job has an id of its own."""
    del etcd_program  # built before the first test
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), 1)
    cluster.start()
    yield cluster.urls[0].removeprefix("http://")
    cluster.stop()
