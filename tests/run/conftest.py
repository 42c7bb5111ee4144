"""A job in local mode in a folder of its own; every test proves that nothing of the run is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.local.local_job import LocalJob
from testcluster.s3 import S3Server


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., LocalJob]]:
    made: list[LocalJob] = []

    def make(store: S3Server | None = None, name: str = "digits", etcd: str | None = None) -> LocalJob:
        job = LocalJob(tmp_path / str(len(made)), store, name, etcd)
        made.append(job)
        return job

    yield make
    for job in made:
        job.remove()
        job.expect_nothing_left()
