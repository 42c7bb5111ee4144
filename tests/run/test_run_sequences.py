"""Random sequences in local mode: tests/support/scenarios/sequences.py, judged by `expect outcome`.

    EVERSTEP_SEEDS=7 pytest -s tests/run/test_run_sequences.py       one seed; EVERSTEP_SEEDS=100:150 for fifty
    EVERSTEP_SEQUENCE=FILE pytest -s tests/run/test_run_sequences.py       a text, to replay or to shrink

`make nightly` plays a few, `make soak` fifty.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from support.local.local_job import NODES, LocalJob
from support.rendezvous.etcd_server import EtcdCluster
from support.scenarios.given import play, texts
from support.scenarios.sequences import EACH_TIME, Place
from testcluster.s3 import S3Server

pytestmark = [pytest.mark.timeout(420), pytest.mark.s3, pytest.mark.long]


@pytest.mark.parametrize("text", texts(os.environ, EACH_TIME, Place(NODES, store=True)))
def test_random_sequence_ends_as_if_undisturbed(
    text: str, new_job: Callable[..., LocalJob], etcd: EtcdCluster, s3_server: S3Server
) -> None:
    play(new_job(s3_server, etcd=etcd.urls[0]), text, "tests/run/test_run_sequences.py")
