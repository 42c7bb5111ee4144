"""Who may what on a cluster: readers of the operator's page, by their own tokens, and the operator, by its roles."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from xml.etree.ElementTree import Element

import pytest
import yaml

from support import ROOT
from support.e2e.driver import LEASE, SYSTEM, Job
from support.e2e.forward import forwarded
from support.e2e.install import CHART, LIMIT, RELEASE, helm, install, uninstall
from support.page.html import parsed, table, words
from support.scenarios.player import wait_for
from testcluster.handle import Cluster

pytestmark = [pytest.mark.kind, pytest.mark.alone]

OPERATOR = f"system:serviceaccount:{SYSTEM}:everstep"
PAGE = ROOT / "docs/reference/page.md"
Call = tuple[str, str, str]  # group, resource, verb
# Calls for which something has to go wrong that is not provoked here.
RARE: set[Call] = set()


@pytest.fixture(scope="module")
def with_page(installed: Cluster) -> Iterator[Cluster]:
    """The installed release with the page on, turned on as the documents say; its replicas are new."""
    helm(
        installed, SYSTEM, "upgrade", RELEASE, CHART, "--reuse-values", "--set", "page.enabled=true",
        "--wait", "--timeout", LIMIT,
    )  # fmt: skip
    yield installed
    install(installed)


@pytest.mark.long
def test_page_shows_a_killed_pod_and_its_recovery_to_those_who_may_get_the_job(
    with_page: Cluster, new_job: Callable[..., Job]
) -> None:
    job = new_job()
    reader, stranger = token(job, "reader"), token(job, "stranger")
    allow(job, "reader")
    path = f"/jobs/{job.namespace}/{job.name}"
    with forwarded(with_page, SYSTEM, "service/everstep-page", 80) as url:
        job.submit(job.elastic(steps=100_000, pause=0.02))
        job.until_step(20)
        job.delete_pod(1)
        job.until_recovered()

        for wrong in ("", "x"):
            code, _ = read(f"{url}{path}", wrong)
            assert code == 401
        code, document = read(f"{url}/", stranger)
        assert (code, job.namespace in words(document)) == (200, False)
        code, document = read(f"{url}{path}", stranger)
        assert (code, job.name in words(document)) == (404, False)

        code, document = read(f"{url}/", reader)
        assert (code, job.name in words(document)) == (200, True)

        def recovered() -> list[Element]:
            code, document = read(f"{url}{path}", reader)
            assert code == 200
            rows = table(document, "recoveries")
            workers = [row[0] for row in table(document, "workers")]  # two of one, until the killed pod is gone
            return [document] if rows and rows[0][1] == "PodDeleted" and workers == ["0", "1", "2"] else []

        (document,) = wait_for("the page shows the recovery", recovered, 30)
        drawn = words(next(e for e in document.iter("section") if e.get("aria-labelledby") == "timeline"))
        assert "✗" in drawn, "its pod died"
        assert "█" in drawn, "workers train"
        assert "WorkerLost" in {row[2] for row in table(document, "events")}


@pytest.mark.long
def test_operator_calls_all_that_its_roles_allow_and_is_refused_nothing(
    with_page: Cluster, new_job: Callable[..., Job]
) -> None:
    uninstall(with_page)
    with_page.kubectl("-n", SYSTEM, "delete", "lease", LEASE)
    began = datetime.now(UTC)
    install(with_page, "page.enabled=true")
    job = new_job()
    *others, budget = foreign = strangers_objects(job)
    job.kubectl("apply", "-f", "-", input=as_list(foreign))
    manifest = job.elastic(steps=600, pause=0.02)
    manifest["spec"]["ttlSecondsAfterFinished"] = 5
    job.submit(manifest)
    # The budget is made when the workers run, the others before.
    for in_the_way in (others, [budget]):
        names = [f"{one['kind']} {one['metadata']['name']} has a name that this job needs" for one in in_the_way]
        wait_for(f"the job says {' or '.join(names)}", lambda names=names: said(job, names), 60)  # type: ignore[misc]
        job.kubectl("delete", "-f", "-", input=as_list(in_the_way))
    job.until_step(20)
    job.delete_pod(1)
    job.until_recovered()
    for _ in range(2):
        job.suspend(True)
        job.wait("no pods", lambda: not job.pods())
        job.suspend(False)
        job.until_training()
    reader = token(job, "reader")
    allow(job, "reader")
    with forwarded(with_page, SYSTEM, "service/everstep-page", 80) as url:
        assert read(f"{url}/jobs/{job.namespace}/{job.name}", reader)[0] == 200
    gone = ("wait", "--for=delete", f"tjob/{job.name}", "--timeout=50s")
    wait_for("the job is deleted", lambda: job.cluster.kubectl("-n", job.namespace, *gone).returncode == 0, 120)

    calls = [event for event in with_page.calls_of(OPERATOR) if received(event) >= began]
    decisions = {call_of(event): event["annotations"]["authorization.k8s.io/decision"] for event in calls}
    assert {call for call, decision in decisions.items() if decision != "allow"} == set()
    assert granted(with_page) - set(decisions) == RARE


def token(job: Job, account: str) -> str:
    """That of a service account of the job's namespace, which is made first."""
    job.kubectl("create", "serviceaccount", account)
    return job.kubectl("create", "token", account).strip()


def allow(job: Job, account: str) -> None:
    """Bind the role that the documents have for readers of the page, in the job's namespace."""
    (role,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    job.kubectl("apply", "-f", "-", input=role)
    name = yaml.safe_load(role)["metadata"]["name"]
    job.kubectl(
        "create", "rolebinding", account, f"--clusterrole={name}", f"--serviceaccount={job.namespace}:{account}"
    )


def read(url: str, token: str) -> tuple[int, Element]:
    """Status and document of a page."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, parsed(answer.read().decode())
    except urllib.error.HTTPError as refusal:
        return refusal.code, parsed(refusal.read().decode())


def strangers_objects(job: Job) -> list[dict[str, Any]]:
    """Objects of nobody that have the names of the job's own."""
    metadata = {"name": f"{job.name}-workers", "namespace": job.namespace}
    pod = {"containers": [{"name": "worker", "image": "none"}], "nodeSelector": {"nowhere": "yes"}}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 80}]}},
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata,
            "spec": {"podSelector": {"matchLabels": {"nobody": "has"}}},
        },
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "name": f"{job.name}-w0-0"}, "spec": pod},
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": {}},
    ]


def as_list(objects: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


def said(job: Job, texts: list[str]) -> bool:
    text = job.kubectl("describe", "tjob", job.name)
    return any(one in text for one in texts)


def received(event: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(event["requestReceivedTimestamp"])


def call_of(event: dict[str, Any]) -> Call:
    """What an entry of the audit log asked for, as a rule would allow it."""
    about = event.get("objectRef")
    if about is None:
        return "", event["requestURI"].partition("?")[0], event["verb"]
    resource = "/".join(filter(None, [about["resource"], about.get("subresource")]))
    return about.get("apiGroup", ""), resource, event["verb"]


def granted(cluster: Cluster) -> set[Call]:
    """All that the release's roles allow the operator."""
    label = ("-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "json")
    shown = (cluster.kubectl("-n", SYSTEM, "get", kind, *label).stdout for kind in ("clusterroles", "roles"))
    rules = [rule for text in shown for role in json.loads(text)["items"] for rule in role["rules"]]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule.get("apiGroups", [""])
        for resource in rule.get("resources") or rule["nonResourceURLs"]
        for verb in rule["verbs"]
    }
