"""A job in local mode in a folder of its own; every test proves that nothing of the run is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.local.local_job import LocalJob
from support.rendezvous.etcd_server import EtcdCluster
from testcluster import programs
from testcluster.s3 import S3Server


def pytest_collection_finish(session: pytest.Session) -> None:
    """Building takes longer than any test may."""
    if not session.config.option.collectonly and any(
        "etcd" in getattr(item, "fixturenames", ()) for item in session.items
    ):
        programs.etcd()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member, on the loopback. Jobs have ids of their own."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), 1)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., LocalJob]]:
    made: list[LocalJob] = []

    def make(
        store: S3Server | None = None, name: str = "digits", faster: float = 1.0, etcd: str | None = None
    ) -> LocalJob:
        job = LocalJob(tmp_path / str(len(made)), store, name, faster, etcd)
        made.append(job)
        return job

    yield make
    for job in made:
        job.remove()
        job.expect_nothing_left()
