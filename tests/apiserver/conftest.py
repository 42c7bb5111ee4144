"""Jobs at a real API server: the CRD installed once, and a helper that makes, reads and changes TrainingJobs.

No operator runs and no admission policy is installed unless a test module does so.
"""

from __future__ import annotations

import copy
import json
import subprocess
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support import ROOT
from testcluster import programs

ABSENT = "<absent>"
CONTAINER = {"name": "worker", "image": "train:1", "command": ["torchrun", "train.py"]}


class Jobs:
    """TrainingJobs of one namespace. `control_plane` has the rest of kubectl."""

    def __init__(self, control_plane: Any, namespace: str) -> None:
        self.control_plane = control_plane
        self.namespace = namespace

    def body(self, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        """A good job with changes: each a path of the spec (`recovery.maxRestarts`) and its value, or "<absent>"."""
        spec: dict[str, Any] = {"replicas": 2, "template": {"spec": {"containers": [copy.deepcopy(CONTAINER)]}}}
        for path, value in changes.items():
            *parents, last = path.split(".")
            node = spec
            for parent in parents:
                node = node.setdefault(parent, {})
            if value == ABSENT:
                node.pop(last)
            else:
                node[last] = value
        meta = {"name": name, "namespace": self.namespace}
        return {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": meta, "spec": spec}

    def kubectl(self, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
        """kubectl in this namespace."""
        done: subprocess.CompletedProcess[str] = self.control_plane.kubectl(
            *arguments, "--namespace", self.namespace, input=input
        )
        return done

    def try_create(self, name: str, changes: dict[str, Any], *flags: str) -> subprocess.CompletedProcess[str]:
        return self.kubectl("create", *flags, "-f", "-", input=json.dumps(self.body(name, changes)))

    def create(self, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        """The job as stored."""
        done = self.try_create(name, changes)
        assert done.returncode == 0, done.stderr
        return self.get(name)

    def get(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.control_plane.get(self._path(name))))

    def exists(self, name: str) -> bool:
        try:
            self.control_plane.get(self._path(name))
        except urllib.error.HTTPError as e:
            if e.code == 404:
                return False
            raise
        return True

    def _path(self, name: str) -> str:
        return f"/apis/everstep.dev/v1alpha1/namespaces/{self.namespace}/trainingjobs/{name}"

    def patch(self, name: str, body: dict[str, Any], *flags: str) -> subprocess.CompletedProcess[str]:
        return self.kubectl("patch", f"tjob/{name}", *flags, "--type=merge", "-p", json.dumps(body))


@pytest.fixture(scope="module")
def jobs(crd: Any, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """A namespace for the jobs of one test module."""
    namespace = request.module.__name__.rpartition(".")[2].replace("_", "-")
    done = crd.kubectl("create", "namespace", namespace)
    assert done.returncode == 0, done.stderr
    yield Jobs(crd, namespace)
    crd.kubectl("delete", "namespace", namespace, "--wait=false")


Helm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def helm(control_plane: Any) -> Helm:
    """`helm <verb> <release> <the chart> ...`; fails the test unless told `expect_failure=True`."""

    def call(verb: str, release: str, *flags: str, expect_failure: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(programs.helm()), verb, release, str(ROOT / "charts/everstep"), *flags],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode != 0) == expect_failure, done.stderr
        return done

    return call
