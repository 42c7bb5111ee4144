"""The TrainingJob that the client creates, as `everstep init` would write it. Pure, but for a name's random end."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

from everstep.client.errors import InvalidRequest
from everstep.client.program import Program
from everstep.contract import labels
from everstep.jobs import names

FOLDER: Final = "/opt/everstep/program"  # where a pod finds the files
GPU: Final = "nvidia.com/gpu"
_VOLUME = "everstep-program"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESOURCES = {"cpu": "cpu", "memory": "memory", "gpu": GPU}


def build(
    program: Program,
    *,
    local: bool,
    name: str | None,
    image: str,
    workers: int,
    elastic: tuple[int, int] | None,
    spares: int,
    env: Mapping[str, Any],
    resources: Mapping[str, Any],
    checkpoint: str | None,
    secret: str | None,
) -> tuple[dict[str, Any], str | None]:
    """The job, and the ConfigMap's name that it takes its files from; None for one whose workers run in the files'
    folder. Raises `InvalidRequest`."""
    name = _name(program.name) if name is None else name
    if not isinstance(name, str) or not names.valid(name):
        raise InvalidRequest(f"name={name!r}: not a {names.RULE}")
    config_map = None if local else f"{name}-program-{secrets.token_hex(3)}"
    folder = "" if local else f"{FOLDER}/"
    container: dict[str, Any] = {
        "name": labels.WORKER_CONTAINER,
        "image": image,
        "command": ["everstep-run", f"{folder}{program.main}", *program.arguments],
    }
    if env:
        container["env"] = [{"name": each, "value": value} for each, value in _variables(env)]
    requests, gpus = _quantities(resources)
    if requests:
        container["resources"] = {"requests": requests}
    if gpus:
        container.setdefault("resources", {})["limits"] = gpus
    pod: dict[str, Any] = {"containers": [container]}
    if config_map is not None:
        container["volumeMounts"] = [{"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}]
        pod["volumes"] = [{"name": _VOLUME, "configMap": {"name": config_map}}]
    spec: dict[str, Any] = {"replicas": _workers(workers), "rendezvous": {"backend": "everstep"}}
    if elastic is not None:
        fewest, most = _bounds(elastic, workers)
        spec["elastic"] = {"minReplicas": fewest, "maxReplicas": most}
    if spares != 0:
        spec["elastic"] = {**_elastic_of(spares, spec.get("elastic")), "spares": spares}
    if any(int(count) > 1 for count in gpus.values()):
        spec["processesPerReplica"] = "auto"  # one for each GPU
    if checkpoint is not None or local:
        spec["checkpoint"] = {"url": checkpoint or "", "keep": 3}  # a local run puts its own folder in place of ""
        if secret is not None:
            spec["checkpoint"]["secretRef"] = {"name": secret}
    elif secret is not None:
        raise InvalidRequest("secret is that of the checkpoint's store: give checkpoint=URL, too")
    spec["template"] = {"spec": pod}
    meta = {"name": name}
    return {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": meta, "spec": spec}, config_map


def _name(program: str) -> str:
    """A name of its own for each job."""
    own = names.cut(program, names.MAX_NAME - 6)
    own = own if own[:1].isalpha() else names.cut(f"job-{own}", names.MAX_NAME - 6)
    return f"{own}-{secrets.token_hex(3)[:5]}"


def _workers(workers: Any) -> int:
    if type(workers) is not int or workers < 1:
        raise InvalidRequest(f"workers={workers!r}: the number of pods, at least 1")
    return workers


def _elastic_of(spares: Any, elastic: dict[str, Any] | None) -> dict[str, Any]:
    """The bounds that a job with spares needs."""
    if type(spares) is not int or spares < 0:
        raise InvalidRequest(f"spares={spares!r}: how many workers wait for the place of a lost one, at least 0")
    if elastic is None:
        raise InvalidRequest(f"spares={spares} needs elastic=(FEWEST, MOST): both may be the number of workers")
    return elastic


def _bounds(elastic: Any, workers: int) -> tuple[int, int]:
    try:
        fewest, most = elastic
    except (TypeError, ValueError):
        raise InvalidRequest(f"elastic={elastic!r}: the fewest and the most workers, as in (2, 4)") from None
    if type(fewest) is not int or type(most) is not int or not 1 <= fewest <= workers <= most:
        raise InvalidRequest(
            f"elastic={elastic!r}: workers={workers} has to be from the fewest to the most, 1 at least"
        )
    return fewest, most


def _variables(env: Mapping[str, Any]) -> list[tuple[str, str]]:
    for name, value in env.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise InvalidRequest(f"env: {name!r} is no name of a variable: letters, digits and '_'")
        if not isinstance(value, str | int | float):
            raise InvalidRequest(f"env: {name} has to be a text or a number")
    return [(name, str(value)) for name, value in env.items()]


def _quantities(resources: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Requests, and limits: what a node counts in whole devices has these alone."""
    requests, limits = {}, {}
    for name, value in resources.items():
        if name not in _RESOURCES and "/" not in str(name):
            raise InvalidRequest(f"resources: {name!r} is none of cpu, memory and gpu, and no name as {GPU}")
        own = _RESOURCES.get(name, name)
        if "/" not in own:
            requests[own] = str(value)
        elif type(value) is int and value >= 1:
            limits[own] = str(value)
        else:
            raise InvalidRequest(f"resources: {name}={value!r}: a number of whole devices, at least 1")
    return requests, limits
