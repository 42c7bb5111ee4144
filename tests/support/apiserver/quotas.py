"""A quota that allows none of a kind, in force at the API server: its admission reads quotas from a cache."""

from __future__ import annotations

from typing import Any

from everstep_operator.kube.errors import Forbidden
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject
from support.apiserver.operators import Place
from support.apiserver.waiting import eventually

QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", KubeObject)


async def allow_none(place: Place, counted: str, resource: Resource[Any], body: dict[str, Any]) -> None:
    """A quota named `none` for what `counted` names. `body`: an object of this kind, to try it."""
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {counted: "0"}}}
    await place.client.create(QUOTAS, place.namespace, quota)
    # Nobody here computes the status from the spec. (With a status alone, admission forgot the quota now and then.)
    await place.client.patch_status(QUOTAS, place.namespace, "none", {"hard": {counted: "0"}, "used": {counted: "0"}})

    async def holds() -> bool:
        try:
            made = await place.client.create(resource, place.namespace, {**body, "metadata": {"name": "tried"}})
        except Forbidden:
            return True
        await place.client.delete(resource, place.namespace, made.metadata.name)
        return False

    await eventually(f"the quota of {counted} is in force", holds)
