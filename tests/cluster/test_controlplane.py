"""The control plane without nodes behaves as the parts of Kubernetes that other tests lean on."""

import json
import time
import urllib.error
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testcluster.controlplane import ControlPlane

pytestmark = pytest.mark.apiserver
LIMIT = 40.0  # seconds for what a controller does; the API server itself believes a token 10 s after its last look


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT} s"
        time.sleep(0.05)


def create(plane: ControlPlane, manifest: dict[str, Any]) -> dict[str, Any]:
    done = plane.kubectl("create", "-o", "json", "-f", "-", input=json.dumps(manifest))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def exists(plane: ControlPlane, path: str) -> bool:
    try:
        plane.get(path)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return False
    return True


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    name = f"plane-{uuid.uuid4().hex[:8]}"
    assert control_plane.kubectl("create", "namespace", name).returncode == 0
    until(lambda: exists(control_plane, f"/api/v1/namespaces/{name}/serviceaccounts/default"), "the service account")
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


def pod(namespace: str, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    }


def test_pod_created_is_stored_with_the_api_servers_defaults(control_plane: ControlPlane, namespace: str) -> None:
    made = create(control_plane, pod(namespace, "one"))
    assert made["status"]["phase"] == "Pending"
    assert made["spec"]["restartPolicy"] == "Always"
    assert made["spec"]["serviceAccountName"] == "default"
    stored = json.loads(control_plane.get(f"/api/v1/namespaces/{namespace}/pods/one"))
    assert stored["metadata"]["uid"] == made["metadata"]["uid"]


def test_owner_deleted_takes_its_dependents(control_plane: ControlPlane, namespace: str) -> None:
    owner = create(
        control_plane,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner", "namespace": namespace}},
    )
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    child = pod(namespace, "child")
    child["metadata"]["ownerReferences"] = [reference]
    create(control_plane, child)
    control_plane.kubectl("-n", namespace, "delete", "configmap", "owner")
    until(lambda: not exists(control_plane, f"/api/v1/namespaces/{namespace}/pods/child"), "garbage collection")


@pytest.mark.long
def test_token_bound_to_a_pod_ends_with_the_pod(control_plane: ControlPlane, namespace: str) -> None:
    uid = create(control_plane, pod(namespace, "bearer"))["metadata"]["uid"]
    issued = control_plane.kubectl(
        "-n", namespace, "create", "token", "default", "--audience=everstep",
        "--bound-object-kind=Pod", "--bound-object-name=bearer", f"--bound-object-uid={uid}",
    )  # fmt: skip
    assert issued.returncode == 0, issued.stderr
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": issued.stdout.strip(), "audiences": ["everstep"]},
    }

    def status() -> dict[str, Any]:
        return dict(create(control_plane, review)["status"])

    assert status()["authenticated"] is True
    assert status()["user"]["extra"]["authentication.kubernetes.io/pod-uid"] == [uid]
    control_plane.kubectl("-n", namespace, "delete", "pod", "bearer", "--force")
    until(lambda: not status().get("authenticated"), "the end of the token")


def test_admission_policy_bound_refuses_what_its_expression_forbids(
    control_plane: ControlPlane, namespace: str
) -> None:
    name = f"policy-{namespace}"
    rule = {
        "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"],
    }  # fmt: skip
    create(
        control_plane,
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [rule]},
                "validations": [{"expression": "has(object.data)", "message": "data: a map without data is refused"}],
            },
        },
    )
    create(
        control_plane,
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {
                "policyName": name,
                "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}},
            },
        },
    )
    tries = iter(range(10_000))

    def refused() -> bool:
        done = control_plane.kubectl("-n", namespace, "create", "configmap", f"empty-{next(tries)}")
        return done.returncode != 0 and "data: a map without data is refused" in done.stderr

    try:
        until(refused, "the policy")
    finally:
        control_plane.kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name)


@pytest.mark.long
def test_api_server_killed_and_started_keeps_what_was_stored(control_plane: ControlPlane, namespace: str) -> None:
    made = create(control_plane, pod(namespace, "kept"))
    control_plane.stop_apiserver()
    with pytest.raises(OSError, match="refused"):
        control_plane.get("/readyz")
    control_plane.start_apiserver()
    stored = json.loads(control_plane.get(f"/api/v1/namespaces/{namespace}/pods/kept"))
    assert stored["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


@pytest.mark.long
def test_api_server_paused_keeps_requests_waiting_until_it_goes_on(control_plane: ControlPlane) -> None:
    control_plane.pause_apiserver()
    try:
        with pytest.raises(OSError, match="timed out"):
            control_plane.get("/readyz", 2.0)
    finally:
        control_plane.resume_apiserver()
    until(lambda: control_plane.get("/readyz") == b"ok", "the answer after the pause")
