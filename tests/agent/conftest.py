"""What the agent's tests share: a real etcd for jobs of several agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent.agent_job import Job
from support.rendezvous.etcd_server import EtcdCluster


@pytest.fixture(scope="session")
def agents_etcd(etcd_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    del etcd_program  # built before the first test
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), 1)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def job(agents_etcd: EtcdCluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`job(script, arguments…)`: its agents are started by the test, and ended with it. None leaves a process."""
    made: list[Job] = []

    def make(*argv: Any, **options: Any) -> Job:
        endpoint = agents_etcd.urls[0].removeprefix("http://")
        made.append(Job(tmp_path, endpoint, *map(str, argv), **options))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()
        one.until(lambda one=one: not one.left_behind(), "processes were left behind", 10)
