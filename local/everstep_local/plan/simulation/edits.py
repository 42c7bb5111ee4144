"""Commands of a transcript for what users edit, and for what the API server and others do to the job's objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from everstep_operator import object_names
from everstep_operator.api.types import GangScheduler

if TYPE_CHECKING:
    from everstep_local.plan.simulation.cluster import World


def ports(world: World, *numbers: str) -> None:
    """The template's worker declares these."""
    _template(world)["spec"]["containers"][0]["ports"] = [{"containerPort": int(number)} for number in numbers]


def toleration(world: World, taint: str, seconds: str = "") -> None:
    """Write one into the template."""
    made = {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
    limit = {"tolerationSeconds": int(seconds)} if seconds else {}
    _template(world)["spec"].setdefault("tolerations", []).append({**made, **limit})


def older_operator(world: World) -> None:
    """All pods were made by an operator that did not write on them what they were made from."""
    for name in world.pods:
        world.change(name, spec_hash=None)


def refuse_object(world: World, what: str = "", reason: str = "") -> None:
    """The API server refuses an object beside the pods; without arguments none any more."""
    world.object_refused = f"{what}: {reason}" if what else None


def network_policies(world: World) -> None:
    """The installation gives each job a NetworkPolicy."""
    world.settings = replace(world.settings, network_policies=True)


def pod_groups(world: World, *schedulers: str) -> None:
    """The installation makes PodGroups of these schedulers."""
    world.settings = replace(world.settings, pod_groups=frozenset(map(GangScheduler, schedulers)))


def volume_claims(world: World) -> None:
    """The installation makes the volume claims that jobs ask for."""
    world.settings = replace(world.settings, volume_claims=True)


def claim(world: World, name: str, size: str) -> None:
    """Each worker gets a volume of its own."""
    made = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    templates = cast(list[Any], world.spec.setdefault("volumeClaimTemplates", []))
    templates.append({"metadata": {"name": name}, "spec": made})


def collide(world: World, kind: str = "", name: str = "", owner_kind: str = "", owner: str = "") -> None:
    """An object of somebody else has a name that the job needs; without arguments none has."""
    whose = (owner_kind, owner) if owner_kind else None
    world.collisions = (object_names.name_collision(kind, name, "default", "digits", whose),) if name else ()


def deleting(world: World) -> None:
    world.deleting = True


def node_joins(world: World, index: str, node: str) -> None:
    """An autoscaler has made a node, and the pod is bound to it; the node itself is not seen yet."""
    world.change(world.current(int(index)), node=node, unschedulable=None, scheduled_at=world.now)


def clock_back(world: World, seconds: str) -> None:
    """The next leader's clock is behind that of the last one by this."""
    world.now = world.now - timedelta(seconds=float(seconds))


def _template(world: World) -> dict[str, Any]:
    """The template, which may now be edited."""
    template = copy.deepcopy(cast(dict[str, Any], world.spec["template"]))
    world.spec = {**world.spec, "template": template}
    return template


EDITS: dict[str, Callable[..., str | None]] = {
    "ports": ports,
    "toleration": toleration,
    "older-operator": older_operator,
    "refuse-object": refuse_object,
    "network-policies": network_policies,
    "pod-groups": pod_groups,
    "volume-claims": volume_claims,
    "claim": claim,
    "collide": collide,
    "deleting": deleting,
    "node-joins": node_joins,
    "clock-back": clock_back,
}
