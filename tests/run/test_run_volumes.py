"""Local mode: each worker has a folder in place of the volume that it claims, and its successor finds it again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from support.local.local_job import LocalJob

pytestmark = [pytest.mark.timeout(200)]
# The first worker of an index leaves a mark and fails; its successor ends well where it finds the mark.
PROGRAM = """
import os, pathlib, sys
mark = pathlib.Path(os.environ["CACHE"], "mark")
if mark.exists():
    sys.exit(0 if mark.read_text() == os.environ["EVERSTEP_WORKER_INDEX"] else 3)
mark.write_text(os.environ["EVERSTEP_WORKER_INDEX"])
sys.exit(1)
"""


def test_successor_of_a_worker_finds_the_volume_of_its_index(new_job: Callable[..., LocalJob]) -> None:
    job = new_job()
    worker: dict[str, Any] = {
        "name": "worker", "image": "local", "command": [sys.executable, "-c", PROGRAM],
        "env": [{"name": "CACHE", "value": "/cache"}], "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }  # fmt: skip
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    job.submit({
        "apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": job.name},
        "spec": {
            "replicas": 2, "rendezvous": {"backend": "everstep"},
            "scheduling": {"podGroup": {"scheduler": "Volcano"}},
            "volumeClaimTemplates": [{"metadata": {"name": "cache"}, "spec": claim}],
            "template": {"spec": {"containers": [worker]}},
        },
    })  # fmt: skip
    job.until_complete(90)
