"""Installs the operator as a user does: images, an S3 server, `helm upgrade --install`."""

from __future__ import annotations

import json

from support import ROOT
from testcluster import kindcluster, programs, project
from testcluster.handle import Cluster
from testcluster.proc import run

NAMESPACE = "everstep-system"


def install(cluster: Cluster) -> None:
    """Idempotent: the same checkout again changes nothing and takes seconds."""
    for tag in project.build():
        cluster.load(tag)
    helm = [str(programs.helm()), "--kubeconfig", str(cluster.kubeconfig), "--namespace", NAMESPACE]
    pending = json.loads(run(*helm, "list", "--pending", "--output", "json"))
    if pending:  # a run was stopped while it installed, and helm waits for it for ever
        run(*helm, "uninstall", "everstep", "--wait", "--timeout", "120s", timeout=180)
    # The tag never changes, so the image's identity in an annotation is what makes Kubernetes roll the pods. It may be
    # digits alone, hence --set-string.
    image_id = run("docker", "inspect", "-f", "{{.Id}}", project.OPERATOR).strip().removeprefix("sha256:")[:12]
    run(
        *helm, "upgrade", "--install", "everstep", str(ROOT / "charts" / "everstep"), "--create-namespace",
        "--set", "image.tag=dev", "--set-string", f"podAnnotations.build={image_id}", "--wait", "--timeout", "120s",
        timeout=180,
    )  # fmt: skip
    kindcluster.wait_ready()
