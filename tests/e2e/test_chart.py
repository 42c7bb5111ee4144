"""The chart in shapes that people install, in namespaces that enforce Pod Security's `restricted`: installed, tested by
`helm test`, a job trains to its end, and `helm uninstall` leaves what the documents say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import ROOT
from support.e2e.driver import LEASE, Job
from support.e2e.install import CHART, LIMIT, RELEASE, helm, install, make_restricted, uninstall
from support.e2e.install import NAMESPACE as SYSTEM
from support.scenarios.player import wait_for
from testcluster import load, programs, project
from testcluster.handle import Cluster
from testcluster.proc import CommandError, run

pytestmark = pytest.mark.kind

TENANTS = ROOT / "docs/how-to-multi-tenant.md"
SERVED = 30  # seconds until the API server serves new kinds
GONE = 60  # seconds until the pods of a release have ended, for which helm does not wait
# What a release may consist of, beside the CRD.
KINDS = (
    "serviceaccounts,deployments,replicasets,pods,services,configmaps,secrets,leases,poddisruptionbudgets,networkpolicies,"
    "ingresses,roles,rolebindings,podmonitors,servicemonitors,prometheusrules"
)
CLUSTER_KINDS = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
LINUX = {
    "weight": 1,
    "preference": {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """`values` are a file of values, beside the image. `by_digest`: the image is named so, and not by its tag."""

    release: str
    namespace: str
    name: str  # of the objects
    values: dict[str, Any] = field(default_factory=dict)
    by_digest: bool = False


SHAPES = {
    "default": Shape(RELEASE, SYSTEM, "everstep"),
    "all of it": Shape(
        "ops",
        "platform-ops",
        "ops-trainer",
        {
            "nameOverride": "trainer",
            "imagePullSecrets": [{"name": "none-here"}],
            "leaseSeconds": 9,
            "nodeSpread": "untaintedNodes",
            "logLevel": "debug",
            "policy": {
                "allowedServiceAccounts": ["", "default", "trainer"],
                "checkpointUrlPrefixes": ["s3://everstep/{namespace}/"],
                "allowedCapabilities": ["IPC_LOCK"],
            },
            "serviceAccount": {"name": "operates", "annotations": {"example.com/role": "operator"}},
            "networkPolicy": {
                "alsoFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
                "probesFrom": [{"ipBlock": {"cidr": "0.0.0.0/0"}}],
            },
            "metrics": {
                "podMonitor": {"enabled": True, "labels": {"release": "mine"}, "interval": "30s"},
                "prometheusRule": {"enabled": True, "labels": {"release": "mine"}},
                "dashboard": {"enabled": True, "annotations": {"grafana_folder": "training"}},
            },
            "page": {"enabled": True, "from": [{"namespaceSelector": {}}]},
            "resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "256Mi"}},
            "podAnnotations": {"example.com/owner": "platform"},
            "podLabels": {"team": "platform"},
            "extraEnv": [{"name": "EVERSTEP_WORKERS", "value": "8"}],
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "tolerations": [{"key": "example.com/spare", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [LINUX]}},
            "priorityClassName": "system-cluster-critical",
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "kubernetes.io/os", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "extraObjects": [
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "beside", "labels": {"app.kubernetes.io/instance": "{{ .Release.Name }}"}},
                    "data": {"where": "{{ .Release.Namespace }}"},
                }
            ],
        },
        by_digest=True,
    ),
    "as little as possible": Shape(
        "everstep-small",
        "small",
        "mine",
        {
            "fullnameOverride": "mine",
            "replicas": 1,
            "crds": {"install": False},
            "policy": {"enabled": False},
            "operatorPolicy": {"enabled": False},
            "serviceAccount": {"create": False},
            "podDisruptionBudget": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "metrics": {"serviceMonitor": {"enabled": True, "interval": "1m"}},
            "page": {
                "enabled": True,
                "ingress": {"enabled": True, "host": "jobs.example.com", "tlsSecret": "jobs-tls"},
            },
        },
    ),
}


@pytest.fixture
def monitoring_kinds_on_nodes(kind_cluster: Cluster) -> Iterator[None]:
    """The kinds of the Prometheus operator, as in a cluster that has it."""
    folder = str(programs.monitoring_kinds())
    applied(kind_cluster, "apply", "--server-side", "-f", folder)
    kinds = [yaml.safe_load(file.read_text())["metadata"]["name"] for file in Path(folder).glob("*.yaml")]
    for kind in kinds:
        applied(kind_cluster, "wait", "--for=condition=Established", f"crd/{kind}", f"--timeout={SERVED}s")
    yield
    applied(kind_cluster, "delete", "--ignore-not-found", "-f", folder)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.usefixtures("monitoring_kinds_on_nodes")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_release_passes_its_test_trains_in_a_restricted_namespace_and_goes_without_a_trace(
    new_job: Callable[..., Job], shape: Shape, tmp_path: Path
) -> None:
    job = new_job()
    cluster = job.cluster
    make_restricted(cluster, job.namespace)
    with in_place_of_the_other(cluster):
        values = tmp_path / "values.yaml"
        values.write_text(yaml.safe_dump({**shape.values, "image": image(cluster, shape)}))
        helm(cluster, shape.namespace, "lint", CHART, "--strict", "--values", str(values))
        make_restricted(cluster, shape.namespace)
        # The CRD that another release left is its own still: docs/how-to-own-cluster.md.
        helm(
            cluster, shape.namespace, "install", shape.release, CHART, "--values", str(values), "--take-ownership",
            "--wait", "--timeout", LIMIT,
        )  # fmt: skip
        expect_operator(cluster, shape)
        shown = helm(cluster, shape.namespace, "test", shape.release, "--logs", "--timeout", LIMIT)
        assert "Phase:          Succeeded" in shown
        assert shown.count("ok    ") == 3
        job.submit(restricted(job.elastic(steps=200, pause=0.02)))
        job.until_complete()
        assert "final step=200" in "".join(job.logs().values())
        uninstall(cluster, shape.release, shape.namespace)
        # What was found is kept for whoever looks for it; the Lease is the operator's own.
        kept = {f"pod/{shape.name}-test", f"lease.coordination.k8s.io/{LEASE}"}
        wait_for(f"nothing but {', '.join(kept)} is left", lambda: left_of(cluster, shape) == kept, GONE)
        assert job.over == "Complete", "the CRD stays, and with it the jobs"


@pytest.mark.long_but("everstep-system-second")
@pytest.mark.parametrize(("namespace", "release"), [("elsewhere", RELEASE), (SYSTEM, "second")])
def test_second_release_is_refused_since_both_would_act_on_all_jobs(
    installed: Cluster, namespace: str, release: str
) -> None:
    flags = ("--create-namespace", "--take-ownership", "--set", "crds.install=false")
    with pytest.raises(CommandError, match=f"release {RELEASE} in namespace {SYSTEM}"):
        helm(installed, namespace, "install", release, CHART, *flags)


@contextmanager
def in_place_of_the_other(cluster: Cluster) -> Iterator[None]:
    """The release that other tests have is away, and what a test installs goes with it."""
    uninstall(cluster)
    try:
        yield
    finally:
        for shape in SHAPES.values():
            helm(cluster, shape.namespace, "uninstall", shape.release, "--ignore-not-found", "--wait")
            if shape.namespace != SYSTEM:
                cluster.kubectl("delete", "namespace", shape.namespace, "--ignore-not-found", "--wait=false")
        install(cluster)


def image(cluster: Cluster, shape: Shape) -> dict[str, str]:
    """The values that name the image of this checkout."""
    if not shape.by_digest:
        return {"tag": "dev"}
    name = f"docker.io/{project.OPERATOR}"
    for node in cluster.nodes():
        ctr = ("docker", "exec", node, *load.CTR, "images")
        (line,) = run(*ctr, "ls", f"name=={name}").splitlines()[1:]
        digest = line.split()[2]
        # As a node knows an image that it has pulled by its digest.
        run(*ctr, "tag", "--force", name, f"{name.rpartition(':')[0]}@{digest}")
    return {"digest": digest, "pullPolicy": "Never"}


def restricted(manifest: dict[str, Any]) -> dict[str, Any]:
    """The job with what the documents say for a namespace that enforces `restricted`."""
    (block,) = re.findall(r"^```yaml\n(spec:\n  template:.*?)^```$", TENANTS.read_text(), re.DOTALL | re.MULTILINE)
    wanted = yaml.safe_load(block)["spec"]["template"]["spec"]
    pod = manifest["spec"]["template"]["spec"]
    pod["securityContext"] = wanted["securityContext"]
    pod["containers"][0] |= wanted["containers"][0]
    return manifest


def expect_operator(cluster: Cluster, shape: Shape) -> None:
    """Its pods are as the values say, and the objects of the release are those of its name."""
    label = ("-l", f"{of(shape)},app.kubernetes.io/component=operator")
    shown = json.loads(applied(cluster, "-n", shape.namespace, "get", "pods", *label, "-o", "json"))["items"]
    pods = [pod for pod in shown if "deletionTimestamp" not in pod["metadata"]]
    assert len(pods) == shape.values.get("replicas", 2)
    for pod in pods:
        assert pod["metadata"]["labels"].items() >= shape.values.get("podLabels", {}).items()
        assert all(status["restartCount"] == 0 for status in pod["status"]["containerStatuses"])
        assert ("@sha256:" in pod["spec"]["containers"][0]["image"]) == shape.by_digest
    for name in left_of(cluster, shape):
        plain = name.rpartition("/")[2]
        assert plain.startswith((shape.name, f"sh.helm.release.v1.{shape.release}.", LEASE, "beside", "operates")), name


def of(shape: Shape) -> str:
    return f"app.kubernetes.io/instance={shape.release}"


def left_of(cluster: Cluster, shape: Shape) -> set[str]:
    """The objects of the release, and what is new in its namespace."""
    own = applied(cluster, "-n", shape.namespace, "get", KINDS, "-o", "name").split()
    own += applied(cluster, "get", CLUSTER_KINDS, "-l", of(shape), "-o", "name").split()
    ever = {"serviceaccount/default", "configmap/kube-root-ca.crt"}
    return {name for name in own if name not in ever}


def applied(cluster: Cluster, *arguments: str) -> str:
    """Output of kubectl, which has to succeed."""
    done = cluster.kubectl(*arguments)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)
