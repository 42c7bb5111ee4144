"""Builds a job's worker pods and headless service, as the API server will store them.

The user's template is kept. We add the identity (labels, owner, host name), torchrun's settings, the worker's token and
the checkpoint settings. A field that would have to be replaced is refused by name when the job is read
(`api.template`). Only variables of the identity replace the user's, because a pod that claims another round could not
be fenced. Tuning settings are only defaults. Our variables come first, because Kubernetes expands $(NAME) only from
earlier ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from everstep.contract import env, labels
from everstep.contract.messages import REPORT_PATH
from everstep_operator import object_names
from everstep_operator.api.template import ETCD_VOLUME, SHM_VOLUME, TOKEN_VOLUME
from everstep_operator.plan.render import agent_limits, claims, network_variables, pod_group, rendezvous, start_probe
from everstep_operator.plan.snapshot import JobView, PodChanges, Settings
from everstep_operator.plan.state import pod_hash

TOKEN_DIR = "/var/run/secrets/everstep.dev"
# Older autoscalers keep a node for the sake of an emptyDir, unless its pod says that it may be lost.
AUTOSCALER_LOSES = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
TOKEN_SECONDS = 3600
DEFAULT_GRACE_SECONDS = 30


def service(job: JobView) -> dict[str, Any]:
    """The headless service. It publishes pods before they are ready, because the rendezvous comes before readiness."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_names.metadata(object_names.service_name(job.name), job.name, job.namespace, job.uid),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.JOB_UID: job.uid},
            "ports": [{"name": "rendezvous", "port": labels.RENDEZVOUS_PORT}],
        },
    }


def grace_seconds(job: JobView) -> int:
    """The seconds that the template gives a worker to end in order, or Kubernetes' default."""
    configured = job.spec.template.get("spec", {}).get("terminationGracePeriodSeconds")
    return configured if isinstance(configured, int) and configured >= 0 else DEFAULT_GRACE_SECONDS


def worker_pod(job: JobView, index: int, round_: int, size: int, settings: Settings) -> dict[str, Any]:
    """The pod of worker `index` in round `round_` of `size` workers, with backend c10d."""
    incarnation = object_names.incarnation_of_round(round_)
    environment = {**_everstep(job, index, incarnation, settings), env.ROUND: str(round_)}
    body = _pod(job, index, incarnation, {**environment, **rendezvous.of_round(job, index, round_, size)})
    body["metadata"]["labels"][labels.ROUND] = str(round_)
    return body


def agent_pod(job: JobView, index: int, incarnation: int, settings: Settings) -> dict[str, Any]:
    """The pod of worker `index` whose agent joins rounds. It has no round of its own, because it may be in many."""
    environment = _everstep(job, index, incarnation, settings)
    identity = {**environment, **rendezvous.of_agents(job, settings)}
    return _pod(job, index, incarnation, identity, agent_limits.tuning(job.spec))


def admitted(body: dict[str, Any], changes: PodChanges) -> dict[str, Any]:
    """The pod, with what its admission to a queue gives it. It does not enter the hash of its spec: a job gets another
    admission only after all of its pods have left."""
    metadata, spec = body["metadata"], body["spec"]
    metadata["labels"] = {**changes.labels, **metadata["labels"]}
    metadata["annotations"] = {**changes.annotations, **metadata["annotations"]}
    if changes.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **changes.node_selector}
    if changes.tolerations:
        spec["tolerations"] = [*(spec.get("tolerations") or ()), *map(dict, changes.tolerations)]
    return body


def avoid(job: JobView, body: dict[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """The pod, which is placed on one of these nodes only if there is no other. A node may be the only one that has
    what the pod needs, so this is a preference.

    Our own spread is left out then. The scheduler weighs it as much as the preference, and it prefers the node that has
    just lost its workers; with the score for free resources on top, that node would win."""
    if not nodes:
        return body
    if not _says_where(job.spec.template.get("spec") or {}):
        body["spec"].pop("topologySpreadConstraints", None)
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    spec = body["spec"]
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    of_node = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    others = of_node.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    term = {"weight": 100, "preference": {"matchFields": fields}}
    of_node["preferredDuringSchedulingIgnoredDuringExecution"] = [*others, term]
    return body


def _pod(
    job: JobView, index: int, incarnation: int, identity: dict[str, str], tuning: dict[str, str] | None = None
) -> dict[str, Any]:
    """The template with the pod's identity. The user cannot set the variables of `identity`; those of `tuning` are only
    defaults."""
    template = copy.deepcopy(job.spec.template)
    spec: dict[str, Any] = template.get("spec", {})
    meta: dict[str, Any] = template.get("metadata", {}) or {}
    name = object_names.pod_name(job.name, index, incarnation)
    container = next(c for c in spec["containers"] if c.get("name") == labels.WORKER_CONTAINER)
    if start_probe.is_needed(job.spec, container):
        container["startupProbe"] = start_probe.probe(job.spec)
        identity = {**identity, env.JOINED_FILE: start_probe.joined_file(job.name, index, incarnation)}
    _inject_environment(container, job, identity, tuning or {})
    for any_container in (container, *(spec.get("initContainers") or ())):
        any_container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _mount(spec, container, TOKEN_DIR, _token_volume())
    if (etcd := job.spec.rendezvous.etcd) is not None and etcd.secret_ref is not None:
        secret = {"name": ETCD_VOLUME, "secret": {"secretName": etcd.secret_ref.name}}
        _mount(spec, container, rendezvous.ETCD_DIR, secret)
    memory_is_ours = _give_shared_memory(spec, container)
    names_account = spec.get("serviceAccountName") or spec.get("serviceAccount")
    if spec.get("automountServiceAccountToken") is None and not names_account:
        spec["automountServiceAccountToken"] = False  # training needs no right of the namespace's account `default`
    claims.put_in(job, index, spec)
    if not _says_where(spec):
        spec["topologySpreadConstraints"] = [_spread(job)]
    if spec.get("hostNetwork"):
        # Kubernetes' default becomes the node's own resolver then, which knows no Service, so not the operator either.
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    # A restarted container would join a round that the operator has given up.
    spec["restartPolicy"] = "Never"
    spec["hostname"] = name
    spec["subdomain"] = object_names.service_name(job.name)
    ours = object_names.metadata(name, job.name, job.namespace, job.uid)
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **ours,
            "labels": {
                **ours["labels"],
                **(meta.get("labels") or {}),  # may have app.kubernetes.io/managed-by, but no label of our domain
                labels.JOB: job.name,
                labels.JOB_UID: job.uid,
                labels.WORKER_INDEX: str(index),
                labels.INCARNATION: str(incarnation),
                labels.SPEC_HASH: pod_hash.of_spec(job.spec),
            },
            "annotations": {
                "kubectl.kubernetes.io/default-container": "worker",
                **({AUTOSCALER_LOSES: SHM_VOLUME} if memory_is_ours else {}),
                **(meta.get("annotations") or {}),
            },
            **({"finalizers": finalizers} if (finalizers := meta.get("finalizers")) else {}),
        },
        "spec": spec,
    }
    pod_group.put_in(job, body)
    return body


def _says_where(spec: dict[str, Any]) -> bool:
    """Whether the template says how its workers lie to each other. An empty list of constraints says that it does not
    matter."""
    affinity = spec.get("affinity") or {}
    placed = spec.get("nodeName") or affinity.get("podAffinity") or affinity.get("podAntiAffinity")
    return spec.get("topologySpreadConstraints") is not None or bool(placed)


def _spread(job: JobView) -> dict[str, Any]:
    """Prefer the node with the fewest workers of the job: a lost node then takes few of them. Where the nodes have no
    room, or are one, it changes nothing."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {labels.JOB_UID: job.uid}},
    }


def _give_shared_memory(spec: dict[str, Any], container: dict[str, Any]) -> bool:
    """Let /dev/shm be as large as the worker's memory, and say whether that was done. A container runtime gives it
    64 MiB: the workers of a DataLoader end there with a bus error, and NCCL does not start. A template that mounts
    something there, or has its node's IPC, keeps that."""
    mounts = container.get("volumeMounts") or ()
    paths = {str(mount.get("mountPath", "")).rstrip("/") for mount in mounts}
    if spec.get("hostIPC") or start_probe.SHARED_MEMORY in paths:
        return False
    memory = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}}
    _mount(spec, container, start_probe.SHARED_MEMORY, memory, read_only=False)
    return True


def _mount(
    spec: dict[str, Any], container: dict[str, Any], path: str, volume: dict[str, Any], *, read_only: bool = True
) -> None:
    """Mount our volume into the worker container alone."""
    mount = {"name": volume["name"], "mountPath": path, **({"readOnly": True} if read_only else {})}
    container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]
    spec["volumes"] = [*(spec.get("volumes") or ()), volume]


def _token_volume() -> dict[str, Any]:
    """The volume of the token. The token names this pod, is valid for our operator alone, and dies with the pod."""
    token = {"audience": labels.TOKEN_AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": "token"}
    return {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}


def _inject_environment(
    container: dict[str, Any], job: JobView, identity: dict[str, str], tuning: dict[str, str]
) -> None:
    tuning = {
        **tuning,
        **network_variables.of_spec(job.spec),
        "PET_MAX_RESTARTS": str(rendezvous.restarts_in_place(job)),
        "PET_MONITOR_INTERVAL": "0.1",
        "PYTHONUNBUFFERED": "1",
        # A process that is asked to stop commits first. It has its pod's grace period, not torchrun's 30 seconds.
        env.GRACE_SECONDS: str(grace_seconds(job)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_seconds(job)),
    }
    reserved = {*identity, *_FIELDS, env.ROUND, env.JOINED_FILE}
    theirs = [e for e in (container.get("env") or ()) if e.get("name") not in reserved]
    user_names = {e.get("name") for e in theirs}
    if "PET_MAX_RESTARTS" in user_names:
        user_names.add(env.MAX_RESTARTS)  # a user who sets the one means both
    ours = {**identity, **{k: v for k, v in tuning.items() if k not in user_names}}
    container["env"] = [
        *({"name": k, "valueFrom": {"fieldRef": {"fieldPath": path}}} for k, path in sorted(_FIELDS.items())),
        *({"name": k, "value": _literal(v)} for k, v in sorted(ours.items())),
        *theirs,
    ]
    if job.spec.checkpoint is not None and job.spec.checkpoint.secret_ref is not None:
        source = {"secretRef": {"name": job.spec.checkpoint.secret_ref.name}}
        container["envFrom"] = [*(container.get("envFrom") or ()), source]


_FIELDS = {
    env.POD_NAME: "metadata.name",
    env.NODE_NAME: "spec.nodeName",
    "PET_LOCAL_ADDR": "status.podIP",  # a master address that needs no DNS
}


def _literal(value: str) -> str:
    """A value that the kubelet does not expand: it would expand $(NAME), but leaves a doubled dollar alone."""
    return value.replace("$", "$$")


def _everstep(job: JobView, index: int, incarnation: int, settings: Settings) -> dict[str, str]:
    variables = {
        env.JOB_NAME: job.name,
        env.JOB_NAMESPACE: job.namespace,
        env.JOB_UID: job.uid,
        env.JOB_CREATED: str(int(job.created_at.timestamp())),
        env.WORKER_INDEX: str(index),
        env.INCARNATION: str(incarnation),
    }
    if settings.report_url:
        variables[env.REPORT_URL] = settings.report_url.rstrip("/") + REPORT_PATH
        variables[env.TOKEN_FILE] = f"{TOKEN_DIR}/token"
        if settings.ca:
            variables[env.CA_CERTIFICATES] = settings.ca
    if (checkpoint := job.spec.checkpoint) is not None:
        variables[env.CHECKPOINT_URL] = checkpoint.url
        variables[env.CHECKPOINT_KEEP] = str(checkpoint.keep)
        if checkpoint.keep_every_steps is not None:
            variables[env.CHECKPOINT_KEEP_EVERY_STEPS] = str(checkpoint.keep_every_steps)
        if checkpoint.keep_every_hours is not None:
            variables[env.CHECKPOINT_KEEP_EVERY_HOURS] = str(checkpoint.keep_every_hours)
        if checkpoint.interval_seconds is not None:
            variables[env.CHECKPOINT_EVERY_SECONDS] = str(checkpoint.interval_seconds)
        if checkpoint.every_steps is not None:
            variables[env.CHECKPOINT_EVERY_STEPS] = str(checkpoint.every_steps)
        if checkpoint.on_preemption:
            variables[env.CHECKPOINT_ON_PREEMPTION] = "1"
    return variables
