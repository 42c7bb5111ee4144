"""TrainingJobs as kubectl makes, reads and changes them."""

from __future__ import annotations

import json
import subprocess
import urllib.error
from typing import Any

from support.conformity.bodies import JOBS, job


class Jobs:
    """TrainingJobs of one namespace. `control_plane` has the rest of kubectl."""

    def __init__(self, control_plane: Any, namespace: str) -> None:
        self.control_plane = control_plane
        self.namespace = namespace

    def body(self, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        """A good job with changes: each a path of the spec (`recovery.maxRestarts`) and its value, or ABSENT."""
        body = job(name, changes)
        body["metadata"]["namespace"] = self.namespace
        return {"apiVersion": JOBS.api_version, "kind": JOBS.kind, **body}

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
