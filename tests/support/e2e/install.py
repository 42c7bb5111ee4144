"""Installs the operator as a user does: images, an S3 server, `helm upgrade --install`."""

from __future__ import annotations

import json

from support import ROOT
from testcluster import kindcluster, project
from testcluster.handle import Cluster
from testcluster.proc import ClusterError, run

CHART = str(ROOT / "charts" / "everstep")
NAMESPACE = "everstep-system"
RELEASE = "everstep"
LIMIT = "120s"


def install(cluster: Cluster, *values: str) -> None:
    """Idempotent: the same checkout again changes nothing and takes seconds. The CRD may be another release's. `values`
    are set besides, as NAME=VALUE; what was set before is not kept."""
    for tag in project.build():
        cluster.load(tag)
    make_restricted(cluster, NAMESPACE)
    if json.loads(helm(cluster, NAMESPACE, "list", "--pending", "--output", "json")):
        uninstall(cluster)  # a run was stopped while it installed, and helm waits for it for ever
    helm(
        cluster, NAMESPACE, "upgrade", "--install", RELEASE, CHART, "--take-ownership",
        "--set", ",".join(["image.tag=dev", *values]), *build_of(project.OPERATOR), "--wait", "--timeout", LIMIT,
    )  # fmt: skip
    kindcluster.wait_ready()


def uninstall(cluster: Cluster, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
    helm(cluster, namespace, "uninstall", release, "--wait", "--timeout", LIMIT)


def helm(cluster: Cluster, namespace: str, *arguments: str) -> str:
    return cluster.helm("--namespace", namespace, *arguments, timeout=180)


def make_restricted(cluster: Cluster, namespace: str) -> None:
    """A namespace, new or not, in which pods run only as Pod Security's strictest level allows."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
    done = cluster.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(body))
    if done.returncode != 0:
        raise ClusterError(f"namespace {namespace}: {done.stderr}")


def build_of(image: str) -> tuple[str, str]:
    """The value by which pods are new where the image is. Its tag never changes, so its identity is an annotation. It
    may be digits alone, hence a string."""
    image_id = run("docker", "inspect", "-f", "{{.Id}}", image).strip().removeprefix("sha256:")[:12]
    return "--set-string", f"podAnnotations.build={image_id}"
