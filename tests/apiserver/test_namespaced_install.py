"""A release that watches namespaces: who may install it, what its account may do, and whose jobs it runs."""

from __future__ import annotations

import asyncio
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep.contract.labels import TOKEN_AUDIENCE
from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep_operator.kube.resources import PODS
from support import ROOT
from support.apiserver.operators import NewPlace, Place
from support.apiserver.replica import Replica
from support.apiserver.waiting import eventually
from support.conformity.bodies import pod

pytestmark = pytest.mark.apiserver

PAGE = (ROOT / "docs/how-to-install.md").read_text().partition("## In some namespaces")[2].partition("\n## ")[0]
GRANT, VALUES = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
INSTALLER = "somebody-of-the-team"


@pytest.fixture(scope="module")
def granted(crd: Any) -> Iterator[Any]:
    """The control plane, with what the document has an administrator grant."""
    done = crd.kubectl("apply", "--server-side", "-f", "-", input=GRANT)
    assert done.returncode == 0, done.stderr
    yield crd
    crd.kubectl("delete", "-f", "-", input=GRANT)


@pytest.fixture
def values(tmp_path: Path) -> tuple[str, ...]:
    """Flags of the document's values."""
    file = tmp_path / "values.yaml"
    file.write_text(VALUES)
    return "-f", str(file)


@dataclass(frozen=True)
class Account:
    """As an administrator's control plane, with another account's token."""

    url: str
    ca_file: Path
    kubeconfig: Path
    token: str


def environment(helm: Any, *flags: str) -> dict[str, str]:
    """The variables of the release's operator, as far as the chart knows their values."""
    rendered = yaml.safe_load_all(helm("template", "everstep", *flags).stdout)
    (deployment,) = [each for each in rendered if each and each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = ("EVERSTEP_PORT", "EVERSTEP_PROBE_PORT")
    return {v["name"]: v["value"] for v in container["env"] if "value" in v and v["name"] not in ports}


async def aggregated(plane: Any, namespace: str) -> None:
    """The installer is administrator of the namespace, and the grant has become a part of that."""
    done = plane.kubectl("create", "rolebinding", "team", "-n", namespace, "--clusterrole=admin", f"--user={INSTALLER}")
    assert done.returncode == 0, done.stderr
    question = ("auth", "can-i", "create", "events.events.k8s.io", "-n", namespace, "--as", INSTALLER)
    await eventually("the grant is in force", lambda: plane.kubectl(*question).returncode == 0)


def test_release_without_cluster_rights_has_no_object_outside_of_namespaces(helm: Any, values: tuple[str, ...]) -> None:
    rendered = helm("template", "everstep", "-n", "ops", *values, "--set", "watchNamespaces={ops,team-a}").stdout
    objects = [each for each in yaml.safe_load_all(rendered) if each]
    assert {each["metadata"].get("namespace") for each in objects} == {"ops", "team-a"}


async def test_policies_of_two_releases_of_one_name_hold_in_their_own_namespaces(
    granted: Any, helm: Any, new_place: NewPlace
) -> None:
    """Each has its own rules; where a release has its own account, no job runs as it."""
    first, second, elsewhere = [(await new_place()).namespace for _ in range(3)]
    manifests = []
    for namespace, prefix in ((first, "s3://first/"), (second, "s3://second/")):
        sets = ("--set", f"watchNamespaces={{{namespace}}},policy.checkpointUrlPrefixes={{{prefix}}}")
        sets += ("--set", "policy.allowedServiceAccounts={default,everstep}", "-s", "templates/policy.yaml")
        manifests.append(helm("template", "everstep", "-n", namespace, *sets).stdout)
    for manifest in manifests:
        done = granted.kubectl("apply", "--server-side", "-f", "-", input=manifest)
        assert done.returncode == 0, done.stderr

    def refusal(namespace: str, url: str, account: str = "default") -> str:
        template = {"spec": {"serviceAccountName": account, "containers": [{"name": "worker", "image": "train"}]}}
        job = {
            "apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "digits"},
            "spec": {"replicas": 1, "checkpoint": {"url": url}, "template": template},
        }  # fmt: skip
        flags = ("--dry-run=server", "-n", namespace, "-f", "-")
        done = granted.kubectl("create", *flags, input=yaml.safe_dump(job))
        return "" if done.returncode == 0 else str(done.stderr)

    try:
        await eventually("the first holds", lambda: "s3://first/" in refusal(first, "s3://second/digits/"))
        await eventually("the second holds", lambda: "s3://second/" in refusal(second, "s3://first/digits/"))
        assert refusal(first, "s3://first/digits/") == ""
        assert refusal(elsewhere, "s3://anywhere/digits/") == ""
        assert "everstep is the operator's own" in refusal(first, "s3://first/digits/", "everstep")
    finally:
        for manifest in manifests:
            granted.kubectl("delete", "-f", "-", input=manifest)


async def test_administrator_of_namespaces_installs_and_a_second_operator_of_one_is_refused(
    granted: Any, helm: Any, new_place: NewPlace, values: tuple[str, ...]
) -> None:
    own, watched, other = [(await new_place()).namespace for _ in range(3)]
    for namespace in (own, watched, other):
        await aggregated(granted, namespace)
    who = ("--kubeconfig", str(granted.kubeconfig), "--kube-as-user", INSTALLER, *values)

    def install(release: str, namespace: str, watches: str, *more: str, **options: Any) -> Any:
        return helm(
            "install", release, "-n", namespace, *who, "--set", f"watchNamespaces={{{watches}}}", *more, **options
        )

    install("everstep", own, watched)
    for release, namespace, watches, why in (
        ("everstep", other, watched, f"acts on the jobs of namespace {watched}"),
        ("second", own, other, "has this namespace's Lease"),
    ):
        refused = install(release, namespace, watches, expect_failure=True).stderr
        assert f"release everstep in namespace {own}, which {why}" in refused
    admin = ("--kubeconfig", str(granted.kubeconfig), "--set", "crds.install=false")
    refused = helm("install", "third", "-n", other, *admin, expect_failure=True).stderr
    assert f"acts on the jobs of namespace {watched}" in refused, "an operator of all namespaces"
    install("everstep", other, other)
    done = helm("upgrade", "everstep", "-n", own, *who, "--set", f"watchNamespaces={{{watched},{own}}}")
    assert done.returncode == 0, "a release is no second one beside itself"


async def test_operator_of_a_namespace_runs_its_jobs_and_leaves_the_others_alone(
    granted: Any, helm: Any, new_place: NewPlace, values: tuple[str, ...], tmp_path: Path
) -> None:
    own, place, gone, elsewhere = [await new_place() for _ in range(4)]
    flags = ("-n", own.namespace, *values, "--set", f"watchNamespaces={{{place.namespace},{gone.namespace}}}")
    manifest = helm("template", "everstep", *flags).stdout
    done = granted.kubectl("apply", "--server-side", "-f", "-", input=manifest)
    assert done.returncode == 0, done.stderr
    # A team that has left: its namespace is in the list, and the Role in it is no more.
    done = granted.kubectl("delete", "rolebinding", "everstep-jobs", "-n", gone.namespace)
    assert done.returncode == 0, done.stderr
    token = granted.kubectl("create", "token", "everstep", "-n", own.namespace).stdout.strip()
    account = Account(granted.url, granted.ca_file, granted.kubeconfig, token)
    replica = Replica(account, own.namespace, "replica-a", tmp_path, in_pod=True, environ=environment(helm, *flags))
    try:
        await elsewhere.create_job()
        await gone.create_job()
        await place.create_job(recovery={"backoffSeconds": {"initial": 0, "max": 0}})
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 137)
        await place.running("digits-w0-1", "digits-w1-1")
        assert (await elsewhere.status(), await elsewhere.names()) == ({}, [])
        assert (await gone.status(), await gone.names()) == ({}, [])

        await tokens_are_judged_without_reviews(granted, replica, place, elsewhere)

        metrics = await asyncio.to_thread(replica.get, "/metrics")
        refused = [line for line in metrics.splitlines() if 'code="403"' in line and not line.endswith(" 0.0")]
        assert all('verb="list"' in line for line in refused), (
            "the namespace of the team that has left, and nothing else"
        )
        lines = replica.lines()
        assert len([line for line in lines if line["msg"].startswith("nodes are not read")]) == 1
        told = [line for line in lines if line["msg"] == "informer interrupted" and line["level"] == "warning"]
        assert {line["namespace"] for line in told} == {gone.namespace}
        assert len(told) == 4, "once for each kind of object"

        done = granted.kubectl("apply", "--server-side", "-f", "-", input=manifest)
        assert done.returncode == 0, done.stderr
        await gone.running("digits-w0-0", "digits-w1-0")
        replica.send(signal.SIGTERM)
        assert await asyncio.to_thread(replica.process.wait, 30) == 0
    finally:
        replica.end()
        granted.kubectl("delete", "-f", "-", "--wait=false", input=manifest)


async def tokens_are_judged_without_reviews(plane: Any, replica: Replica, place: Place, elsewhere: Place) -> None:
    """A worker's token is accepted as long as its pod lives; nobody else's is."""
    made = await elsewhere.client.create(PODS, elsewhere.namespace, pod("w0"))
    own = (await place.pods())["digits-w0-1"]

    def token(namespace: str, name: str, uid: str) -> str:
        bound = ("--bound-object-kind", "Pod", "--bound-object-name", name, "--bound-object-uid", uid)
        done = plane.kubectl("create", "token", "default", "-n", namespace, "--audience", TOKEN_AUDIENCE, *bound)
        assert done.returncode == 0, done.stderr
        return str(done.stdout.strip())

    good = token(place.namespace, "digits-w0-1", own.metadata.uid)
    head, body, signature = good.split(".")
    assert await report(replica, good) == 204
    assert await report(replica, f"{head}.{body}.{'AB'[signature[0] == 'A']}{signature[1:]}") == 401
    assert await report(replica, token(elsewhere.namespace, "w0", made.metadata.uid)) == 503, "no agent ends by it"

    late = await place.client.create(PODS, place.namespace, pod("late"))
    dead = token(place.namespace, "late", late.metadata.uid)
    await place.client.delete(PODS, place.namespace, "late", grace_seconds=0)
    assert await report(replica, dead) == 401


async def report(replica: Replica, token: str) -> int:
    """The status with which a progress report is answered."""
    url = f"http://127.0.0.1:{replica.port}{REPORT_PATH}"
    request = urllib.request.Request(
        url,
        Report(Phase.TRAIN, 1, 2, time.time(), round=2).encode(),
        {"Authorization": f"Bearer {token}"},
        method="POST",
    )

    def send() -> int:
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code

    return await asyncio.to_thread(send)
