"""Each verb of the client, and each refusal, as the real API server does them."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from everstep_operator.kube.client import TokenIdentity, TokenRefused
from everstep_operator.kube.credentials import InCluster, KubeConfig
from everstep_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    ConnectionFailed,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    Unauthorized,
)
from everstep_operator.kube.resources import PODS, Resource, custom_resource
from everstep_operator.kube.session import Request
from everstep_operator.kube.transport import HttpKubeClient
from everstep_operator.kube.wire import Unstructured
from support.apiserver.network import Network
from support.apiserver.waiting import compact, eventually
from support.conformity.bodies import CONFIGMAPS, NAMESPACES, pod

pytestmark = pytest.mark.apiserver


async def test_object_lives_from_create_to_delete(client: HttpKubeClient, namespace: str) -> None:
    made = await client.create(PODS, namespace, pod("w0", job="j"))
    assert made.metadata.uid
    assert made.metadata.creation_timestamp is not None
    assert (await client.get(PODS, namespace, "w0")).metadata.uid == made.metadata.uid
    with pytest.raises(AlreadyExists, match=rf"create pods {namespace}/w0: 409 AlreadyExists"):
        await client.create(PODS, namespace, pod("w0"))
    await client.delete(PODS, namespace, "w0", uid=made.metadata.uid, grace_seconds=0)
    with pytest.raises(NotFound):
        await client.get(PODS, namespace, "w0")
    with pytest.raises(NotFound):
        await client.delete(PODS, namespace, "w0", uid=made.metadata.uid)


async def test_invalid_object_is_refused_with_its_fields(client: HttpKubeClient, namespace: str) -> None:
    body = {"metadata": {"name": "w0"}, "spec": {"containers": [], "restartPolicy": "Perhaps"}}
    with pytest.raises(Invalid) as caught:
        await client.create(PODS, namespace, body)
    assert {"spec.containers", "spec.restartPolicy"} <= {cause.field for cause in caught.value.causes}


async def test_list_reads_all_pages_of_a_selector(client: HttpKubeClient, namespace: str) -> None:
    for n in range(7):
        body = {"metadata": {"name": f"c{n}", "labels": {"parity": "odd" if n % 2 else "even"}}}
        await client.create(CONFIGMAPS, namespace, body)
    listed = await client.list(CONFIGMAPS, namespace, label_selector="parity=even", limit=1)
    assert [item.metadata.name for item in listed.items] == ["c0", "c2", "c4", "c6"]
    everywhere = await client.list(CONFIGMAPS, label_selector="parity in (odd)", limit=2)
    assert [item.metadata.name for item in everywhere.items if item.metadata.namespace == namespace] == [
        "c1",
        "c3",
        "c5",
    ]
    assert int(listed.resource_version) > 0


async def test_list_whose_history_is_compacted_between_pages_is_whole_and_new(
    client: HttpKubeClient, namespace: str, control_plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(4):
        await client.create(CONFIGMAPS, namespace, {"metadata": {"name": f"c{n}"}})
    send = client._exchange
    pages = 0

    async def meddle(request: Request, *, idempotent: bool) -> bytes:
        nonlocal pages
        body = await send(request, idempotent=idempotent)
        pages += 1
        if pages == 1:
            # A delete, its history compacted, and no cache that could still serve the old snapshot.
            await client.delete(CONFIGMAPS, namespace, "c3")
            newest = await client.create(CONFIGMAPS, namespace, {"metadata": {"name": "c9"}})
            control_plane.stop_apiserver()
            await asyncio.to_thread(compact, control_plane, newest.metadata.resource_version)
            await asyncio.to_thread(control_plane.start_apiserver)
        return body

    monkeypatch.setattr(client, "_exchange", meddle)
    listed = await client.list(CONFIGMAPS, namespace, limit=2)
    names = [item.metadata.name for item in listed.items if item.metadata.name.startswith("c")]
    assert names == ["c0", "c1", "c2", "c9"]


async def test_stale_resource_version_conflicts(client: HttpKubeClient, namespace: str) -> None:
    old = await client.create(PODS, namespace, pod("w0"))
    stale = old.metadata.resource_version
    new = await client.patch_status(PODS, namespace, "w0", {"phase": "Running"}, resource_version=stale)
    assert new.status.phase == "Running"
    with pytest.raises(Conflict):
        await client.patch_status(PODS, namespace, "w0", {"phase": "Failed"}, resource_version=stale)
    assert (await client.get(PODS, namespace, "w0")).status.phase == "Running"
    configmap = await client.create(CONFIGMAPS, namespace, {"metadata": {"name": "c"}, "data": {"a": "1"}})
    body = {"metadata": {"name": "c", "resourceVersion": configmap.metadata.resource_version}, "data": {"a": "2"}}
    await client.replace(CONFIGMAPS, namespace, "c", body)
    with pytest.raises(Conflict):
        await client.replace(CONFIGMAPS, namespace, "c", body)


async def test_status_patch_of_a_recreated_object_conflicts(client: HttpKubeClient, namespace: str) -> None:
    old = await client.create(PODS, namespace, pod("w0"))
    await client.delete(PODS, namespace, "w0", grace_seconds=0)
    await client.create(PODS, namespace, pod("w0"))
    with pytest.raises(Conflict):
        await client.patch_status(
            PODS, namespace, "w0", {"phase": "Failed"}, resource_version=old.metadata.resource_version
        )


async def test_merge_patch_deletes_by_null(client: HttpKubeClient, namespace: str) -> None:
    await client.create(CONFIGMAPS, namespace, {"metadata": {"name": "c", "annotations": {"a": "1", "b": "2"}}})
    patched = await client.merge_patch(CONFIGMAPS, namespace, "c", {"metadata": {"annotations": {"a": None}}})
    assert patched.metadata.annotations == {"b": "2"}


async def test_delete_with_another_uid_or_version_leaves_the_object(client: HttpKubeClient, namespace: str) -> None:
    made = await client.create(PODS, namespace, pod("w0"))
    with pytest.raises(Conflict, match="UID"):
        await client.delete(PODS, namespace, "w0", uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(Conflict):
        await client.delete(PODS, namespace, "w0", uid=made.metadata.uid, resource_version="1")
    assert (await client.get(PODS, namespace, "w0")).metadata.deletion_timestamp is None


def bound_token(control_plane: Any, namespace: str, pod: str, uid: str, audience: str) -> str:
    done = control_plane.kubectl(
        "create", "token", "default", "-n", namespace, "--audience", audience,
        "--bound-object-kind", "Pod", "--bound-object-name", pod, "--bound-object-uid", uid,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


@pytest.mark.long
async def test_pod_bound_token_names_its_pod_and_dies_with_it(
    client: HttpKubeClient, namespace: str, control_plane: Any
) -> None:
    made = await client.create(PODS, namespace, pod("w0"))
    token = bound_token(control_plane, namespace, "w0", made.metadata.uid, "everstep.dev/operator")
    identity = await client.review_token(token, ["everstep.dev/operator"])
    assert isinstance(identity, TokenIdentity)
    assert (identity.namespace, identity.pod_name, identity.pod_uid) == (namespace, "w0", made.metadata.uid)
    assert identity.audiences == ("everstep.dev/operator",)
    assert isinstance(await client.review_token(token, ["another-audience"]), TokenRefused)
    assert isinstance(await client.review_token("no.such.token", ["everstep.dev/operator"]), TokenRefused)
    await client.delete(PODS, namespace, "w0", grace_seconds=0)

    async def refused() -> bool:
        return isinstance(await client.review_token(token, ["everstep.dev/operator"]), TokenRefused)

    await eventually("the token died with its pod", refused)


def account_files(folder: Path, control_plane: Any, token: str) -> InCluster:
    """What a kubelet would mount."""
    (folder / "token").write_text(token)
    (folder / "ca.crt").write_bytes(control_plane.ca_file.read_bytes())
    host, port = control_plane.url.removeprefix("https://").split(":")
    return InCluster(folder, host, port)


async def test_service_account_without_rights_is_forbidden_until_it_gets_them(
    client: HttpKubeClient, namespace: str, control_plane: Any, tmp_path: Path
) -> None:
    token = control_plane.kubectl("create", "token", "default", "-n", namespace).stdout.strip()
    async with HttpKubeClient(account_files(tmp_path, control_plane, token)) as poor:
        with pytest.raises(Forbidden, match="cannot list resource"):
            await poor.list(PODS, namespace)
        done = control_plane.kubectl(
            "create", "rolebinding", "r", "-n", namespace, "--clusterrole=view", f"--serviceaccount={namespace}:default"
        )
        assert done.returncode == 0, done.stderr

        async def allowed() -> bool:
            try:
                await poor.list(PODS, namespace)
            except Forbidden:
                return False
            return True

        await eventually("the role binding works", allowed)


async def test_rotated_token_file_is_used_without_a_restart(
    client: HttpKubeClient, namespace: str, control_plane: Any, tmp_path: Path
) -> None:
    source = account_files(tmp_path, control_plane, "outdated")
    async with HttpKubeClient(source) as rotating:
        with pytest.raises(Unauthorized):
            await rotating.list(PODS, namespace)
        token = control_plane.kubectl("create", "token", "default", "-n", "kube-system").stdout.strip()
        account_files(tmp_path, control_plane, token)
        with pytest.raises(Forbidden, match="system:serviceaccount:kube-system:default"):
            await rotating.list(PODS, namespace)
        account_files(tmp_path, control_plane, control_plane.token)
        assert (await rotating.list(PODS, namespace)).items == ()


async def test_server_is_reached_at_an_ipv6_address(namespace: str, control_plane: Any, tmp_path: Path) -> None:
    source = account_files(tmp_path, control_plane, control_plane.token)
    network = Network(control_plane.kubeconfig, tmp_path)
    port = await network.start("::1")
    try:
        async with HttpKubeClient(InCluster(source.directory, "::1", str(port))) as client:
            assert (await client.list(PODS, namespace)).items == ()
    finally:
        await network.stop()


async def test_rotated_authority_is_trusted_without_a_restart(
    namespace: str, control_plane: Any, tmp_path: Path
) -> None:
    source = account_files(tmp_path, control_plane, control_plane.token)
    good = (tmp_path / "ca.crt").read_bytes()
    other = tmp_path / "other.key"
    process = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-subj", "/CN=other", "-keyout", str(other), "-out", str(tmp_path / "ca.crt"),
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await process.wait() == 0
    async with HttpKubeClient(source) as rotating:
        with pytest.raises(ConnectionFailed, match=f"certificate is not trusted by {tmp_path}/ca.crt: "):
            await rotating.get(PODS, namespace, "w0")
        (tmp_path / "ca.crt").write_bytes(good)
        rotating._session._loaded_at -= 60
        with pytest.raises(NotFound):
            await rotating.get(PODS, namespace, "w0")


async def test_terminating_namespace_is_told_apart(client: HttpKubeClient, namespace: str) -> None:
    body = {"metadata": {"name": "holds", "finalizers": ["everstep.dev/test"]}}
    await client.create(CONFIGMAPS, namespace, body)
    await client.delete(NAMESPACES, None, namespace)
    with pytest.raises(Forbidden) as caught:
        await client.create(PODS, namespace, pod("w0"))
    assert "NamespaceTerminating" in {cause.reason for cause in caught.value.causes}
    await client.merge_patch(CONFIGMAPS, namespace, "holds", {"metadata": {"finalizers": None}})


@pytest.mark.long
async def test_custom_object_of_absurd_depth_hides_no_other(
    client: HttpKubeClient, namespace: str, control_plane: Any
) -> None:
    crds = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CRD", Unstructured, namespaced=False)
    things = custom_resource("test.everstep.dev", "v1", "things", "Thing", Unstructured)
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.test.everstep.dev"},
        "spec": {
            "group": "test.everstep.dev",
            "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    with suppress(AlreadyExists):
        await client.create(crds, None, crd)

    async def served() -> bool:
        try:
            await client.list(things, namespace)
        except NotFound:
            return False
        return True

    await eventually("the CRD is served", served)
    await client.create(things, namespace, {"metadata": {"name": "good"}, "spec": {"n": 1}})
    depth = 2500
    evil = (
        '{"apiVersion":"test.everstep.dev/v1","kind":"Thing","metadata":{"name":"evil"},"spec":{"x":'
        + '{"a":' * depth + "1" + "}" * depth + "}}"
    )  # fmt: skip
    path = f"/apis/test.everstep.dev/v1/namespaces/{namespace}/things"
    done = control_plane.kubectl("create", "--raw", path, "-f", "-", input=evil)
    assert done.returncode == 0, done.stderr
    listed = await client.list(things, namespace)
    assert [(item.metadata.name, item.spec.get("n")) for item in listed.items] == [("evil", None), ("good", 1)]
    assert (await client.get(things, namespace, "evil")).metadata.name == "evil"


async def test_watch_from_a_forgotten_version_is_gone(client: HttpKubeClient, namespace: str) -> None:
    with pytest.raises(Gone):
        async for _ in client.watch(PODS, namespace, resource_version="1", timeout_seconds=5):
            pass


async def test_client_through_json_kubeconfig_of_several_files(
    control_plane: Any, namespace: str, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.write_text(json.dumps({"apiVersion": "v1", "kind": "Config"}))
    async with HttpKubeClient(KubeConfig(f"{control_plane.kubeconfig}:{empty}")) as client:
        assert (await client.list(PODS, namespace)).items == ()
