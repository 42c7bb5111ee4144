"""A job that is restarted as a whole goes on: the table of tests/support/scenarios/rows.py in local mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.local.local_job import LocalJob
from support.rendezvous.etcd_server import EtcdCluster
from support.scenarios.rows import HERE, ROWS, Row

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_job_restarted_as_a_whole_ends_as_if_undisturbed(
    row: Row, new_job: Callable[..., LocalJob], etcd: EtcdCluster
) -> None:
    new_job(etcd=etcd.urls[0]).play(row.text(HERE))
