"""What the table of ordinary scripts shares: helpers of other folders on the path, and a real etcd for its agents."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "agent", HERE.parent / "rendezvous"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from etcd_server import EtcdCluster  # noqa: E402


@pytest.fixture(scope="session")
def endpoint(etcd_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an etcd that all rows share: each job has an id of its own."""
    del etcd_program  # built before the first test
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), 1)
    cluster.start()
    yield cluster.urls[0].removeprefix("http://")
    cluster.stop()
