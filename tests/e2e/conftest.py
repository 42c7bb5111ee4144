"""The cluster with the operator installed by Helm, and a job in a namespace of its own for each test."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.e2e.driver import Job
from support.e2e.install import install
from testcluster import cache
from testcluster.handle import Cluster

FOLDER = Path(__file__).parent
# Each wait of a test has a bound of its own, and says what it waited for. This one is for what is no such wait.
TEST_SECONDS = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == FOLDER and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def installed(kind_cluster: Cluster, testrun_uid: str, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The operator of this checkout on the cluster, both replicas ready; installed once, by the first process."""
    done = tmp_path_factory.getbasetemp().parent / f"installed-{testrun_uid}"
    with cache.lock("e2e-install"):
        if not done.exists():
            install(kind_cluster)
            done.touch()
    return kind_cluster


@pytest.fixture
def new_job(installed: Cluster) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(name: str = "digits", namespace: str | None = None) -> Job:
        job = Job(installed, namespace or f"e2e-{secrets.token_hex(3)}", name)
        job.prepare()
        made.append(job)
        return job

    yield make
    for job in made:
        job.remove()
