"""A Python client for jobs on clusters and local runs: see docs/reference/client.md.

Importing it loads neither torch nor the official Kubernetes client.
"""

from __future__ import annotations

from everstep.client.client import TrainingClient
from everstep.client.errors import (
    ClientError,
    ClusterUnavailable,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    WaitTimeout,
)
from everstep.client.shapes import STATUSES, Checkpoint, Event, Job, Rows, Worker

__all__ = [
    "STATUSES",
    "Checkpoint",
    "ClientError",
    "ClusterUnavailable",
    "Event",
    "InvalidRequest",
    "Job",
    "JobFailed",
    "JobNotFound",
    "Rows",
    "TrainingClient",
    "WaitTimeout",
    "Worker",
]
