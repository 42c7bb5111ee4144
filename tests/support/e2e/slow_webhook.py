"""An admission webhook that takes its time, on a cluster with nodes: served by a pod, asked for one namespace's pods.

A configuration that is left behind would refuse pods of other tests for ever. So it names one namespace and the pods of
jobs alone, it ignores a server that is gone, and `slow_creates` deletes it whatever happens, and before its server.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.contract import labels
from support.e2e import slow_review
from support.scenarios.player import wait_for
from support.scenarios.reference import ScenarioError
from testcluster import project
from testcluster.handle import Cluster
from testcluster.proc import run

NAME = "slow-review"
READY_SECONDS = 60
TIMEOUT_SECONDS = 20  # after which the API server goes on without an answer
MARK = "everstep-test=slow-review"
LINE = re.compile(r"^review (\S+) (\S+) waiting (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reviews:
    """What the webhook was asked until now."""

    cluster: Cluster
    namespace: str  # of the server's pod

    def lines(self) -> list[tuple[str, int]]:
        """For each review, the object's name and how many were waiting."""
        done = self.cluster.kubectl("-n", self.namespace, "logs", NAME)
        return [(name, int(waiting)) for _, name, waiting in LINE.findall(done.stdout)]

    def most_waiting(self) -> int:
        return max((waiting for _, waiting in self.lines()), default=0)


@contextmanager
def slow_creates(cluster: Cluster, namespace: str, seconds: float, folder: Path) -> Iterator[Reviews]:
    """Creating a pod of a job in `namespace` takes `seconds`, until the block ends. `folder` is for certificates."""
    own = f"slow-review-{secrets.token_hex(3)}"
    forget_left_behind(cluster)
    try:
        _serve(cluster, own, seconds, folder)
        _apply(cluster, _configuration(own, namespace, (folder / "ca.crt").read_bytes()))
        yield Reviews(cluster, own)
    finally:
        cluster.kubectl("delete", "validatingwebhookconfiguration", own, "--ignore-not-found")
        cluster.kubectl("delete", "namespace", own, "--ignore-not-found", "--wait=false")


def forget_left_behind(cluster: Cluster) -> None:
    """Those of a test that was killed."""
    cluster.kubectl("delete", "validatingwebhookconfiguration", "-l", MARK, "--ignore-not-found")


def _apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    done = cluster.kubectl("apply", "-f", "-", input=text)
    if done.returncode != 0:
        raise ScenarioError(f"the slow webhook could not be made: {done.stderr}")


def _certificates(folder: Path, host: str) -> None:
    """An authority, and a certificate for `host` that it signed."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run(
        "openssl", "req", "-x509", *key, "-days", "2", "-subj", "/CN=slow-review-ca",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt"),
    )  # fmt: skip
    extensions, request = folder / "extensions", folder / "tls.csr"
    extensions.write_text(
        f"subjectAltName=DNS:{host}\nbasicConstraints=CA:FALSE\nkeyUsage=digitalSignature\n"
        "extendedKeyUsage=serverAuth\nauthorityKeyIdentifier=keyid\n"
    )
    run("openssl", "req", *key, "-subj", "/CN=slow-review", "-keyout", str(folder / "tls.key"), "-out", str(request))
    run(
        "openssl", "x509", "-req", "-days", "2", "-in", str(request), "-CA", str(folder / "ca.crt"),
        "-CAkey", str(folder / "ca.key"), "-CAcreateserial", "-extfile", str(extensions),
        "-out", str(folder / "tls.crt"),
    )  # fmt: skip


def _serve(cluster: Cluster, own: str, seconds: float, folder: Path) -> None:
    """Its namespace is its own, so that no pod of it is asked about."""
    _certificates(folder, f"{NAME}.{own}.svc")
    done = cluster.kubectl("create", "namespace", own)
    if done.returncode != 0:
        raise ScenarioError(f"namespace {own}: {done.stderr}")

    def account() -> bool:
        return cluster.kubectl("-n", own, "get", "serviceaccount", "default").returncode == 0

    wait_for(f"the service account of {own}", account, READY_SECONDS)
    pair = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in ("tls.crt", "tls.key")}
    at = {"name": NAME, "namespace": own}
    program = Path(slow_review.__file__).read_text()
    container = {
        "name": NAME,
        "image": project.DIGITS,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "/program/slow_review.py", str(seconds)],
        "readinessProbe": {"tcpSocket": {"port": slow_review.PORT}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "program", "mountPath": "/program"},
            {"name": "certificates", "mountPath": slow_review.CERTIFICATES},
        ],
    }
    volumes = [
        {"name": "program", "configMap": {"name": NAME}},
        {"name": "certificates", "secret": {"secretName": NAME}},
    ]
    _apply(
        cluster,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": at, "data": {"slow_review.py": program}},
        {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": at, "data": pair},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": at,
            "spec": {"selector": {"app": NAME}, "ports": [{"port": 443, "targetPort": slow_review.PORT}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**at, "labels": {"app": NAME}},
            "spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0},
        },
    )
    ready = ("wait", "--for=condition=Ready", f"pod/{NAME}", f"--timeout={READY_SECONDS}s")
    if (done := cluster.kubectl("-n", own, *ready)).returncode != 0:
        said = cluster.kubectl("-n", own, "describe", "pod", NAME).stdout
        raise ScenarioError(f"the slow webhook does not start: {done.stderr}\n{said}")


def _configuration(own: str, namespace: str, authority: bytes) -> dict[str, Any]:
    key, _, value = MARK.partition("=")
    hook = {
        "name": "slow-review.everstep.dev",
        "clientConfig": {
            "service": {"name": NAME, "namespace": own, "port": 443},
            "caBundle": base64.b64encode(authority).decode(),
        },
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "objectSelector": {"matchExpressions": [{"key": labels.JOB_UID, "operator": "Exists"}]},
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "timeoutSeconds": TIMEOUT_SECONDS,
        "admissionReviewVersions": ["v1"],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": own, "labels": {key: value}},
        "webhooks": [hook],
    }
