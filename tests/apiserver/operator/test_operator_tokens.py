"""Which tokens the pods of a job have at a real API server, and what the operator's own is good for."""

from __future__ import annotations

import asyncio
import copy
import ssl
import urllib.error
import urllib.request
from typing import Any

import pytest

from everstep.contract.labels import TOKEN_AUDIENCE
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import Unstructured
from support.apiserver.operators import TEMPLATE, Operators, Place
from support.conformity.bodies import ACCOUNTS

pytestmark = pytest.mark.apiserver

FULL_PODS = Resource("", "v1", "pods", "Pod", Unstructured)
SIDE_CAR = {"name": "logs", "image": "logs:1"}
API_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"  # where the API server mounts it if nothing forbids that


def template(**spec: Any) -> dict[str, Any]:
    asked: Any = copy.deepcopy(TEMPLATE)
    asked["spec"]["containers"].append(SIDE_CAR)
    asked["spec"].update(spec)
    return asked


async def pod_of(place: Place, **spec: Any) -> Unstructured:
    """The pod of a job with such a template, as the API server has stored it."""
    await place.create_job(replicas=1, template=template(**spec))
    async with Operators(place).run():
        await place.running("digits-w0-0")
    return await place.client.get(FULL_PODS, place.namespace, "digits-w0-0")


def audiences(pod: Unstructured) -> list[str]:
    """Of each token that the pod has; empty for the API server's own."""
    sources = [s for v in pod.spec["volumes"] for s in v.get("projected", {}).get("sources", ())]
    return [s["serviceAccountToken"].get("audience", "") for s in sources if "serviceAccountToken" in s]


def mounted(pod: Unstructured) -> list[str]:
    """The containers that the API server's own token is mounted into."""
    paths = {c["name"]: [m["mountPath"] for m in c.get("volumeMounts", ())] for c in pod.spec["containers"]}
    return [name for name, mounts in paths.items() if API_TOKEN in mounts]


async def test_pod_has_no_token_of_the_api_server_though_its_account_mounts_one(place: Place) -> None:
    await place.client.merge_patch(ACCOUNTS, place.namespace, "default", {"automountServiceAccountToken": True})
    pod = await pod_of(place)
    assert (audiences(pod), mounted(pod)) == ([TOKEN_AUDIENCE], [])


@pytest.mark.parametrize("spec", [{"automountServiceAccountToken": True}, {"serviceAccountName": "default"}])
async def test_pod_whose_template_asks_has_one_in_each_container(place: Place, spec: dict[str, Any]) -> None:
    pod = await pod_of(place, **spec)
    assert sorted(audiences(pod)) == ["", TOKEN_AUDIENCE]
    assert mounted(pod) == ["worker", "logs"]


async def test_account_that_mounts_none_is_obeyed_though_the_template_names_it(place: Place) -> None:
    await place.client.merge_patch(ACCOUNTS, place.namespace, "default", {"automountServiceAccountToken": False})
    pod = await pod_of(place, serviceAccountName="default")
    assert (audiences(pod), mounted(pod)) == ([TOKEN_AUDIENCE], [])


async def test_token_for_the_operator_is_refused_by_the_api_server(crd: Any, place: Place) -> None:
    pod = await pod_of(place)
    bound = ("--bound-object-kind", "Pod", "--bound-object-name", "digits-w0-0", "--bound-object-uid", pod.metadata.uid)

    def answer(*audience: str) -> int:
        done = crd.kubectl("create", "token", "default", "-n", place.namespace, *bound, *audience)
        assert done.returncode == 0, done.stderr
        request = urllib.request.Request(f"{crd.url}/api", headers={"Authorization": f"Bearer {done.stdout.strip()}"})
        context = ssl.create_default_context(cafile=str(crd.ca_file))
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code

    assert await asyncio.to_thread(answer) == 200, "a token of the API server's own audience is accepted"
    assert await asyncio.to_thread(answer, "--audience", TOKEN_AUDIENCE) == 401
