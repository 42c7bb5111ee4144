"""`everstep render`: the objects that the operator would create for the job of a file. It needs no cluster.

A cluster in memory checks the job as an API server does, and the operator's own planner makes the objects.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from everstep.cli.printing import say
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.plan import saved_snapshot
from everstep_local.run.job_file import Overrides, Prepared, load
from everstep_local.run.manifest import JobFileError
from everstep_operator.api.base import SpecError
from everstep_operator.api.types import GangScheduler
from everstep_operator.kube.errors import KubeError
from everstep_operator.main import JOBS
from everstep_operator.plan.actions import (
    CreateDisruptionBudget,
    CreateNetworkPolicy,
    CreatePod,
    CreatePodGroup,
    CreateService,
)
from everstep_operator.plan.planner import plan
from everstep_operator.runtime.clock import SystemClock

FORMATS = ("yaml", "json")
CREATED = datetime(2026, 1, 1, tzinfo=UTC)  # the same objects each time, so that two versions of a file can be compared


class _Clock(SystemClock):
    def now(self) -> datetime:
        return CREATED


app = typer.Typer(add_completion=False)
EXPECTED = (JobFileError,)


@app.command()
def render(
    file: Annotated[Path, typer.Argument(help="A TrainingJob's YAML file, as `kubectl apply -f` takes it.")],
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Instead of the file's, or of `default`.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="yaml or json")] = "yaml",
) -> None:
    """Print the pods and other objects that the operator would create for a job's file. Asks no cluster."""
    if output not in FORMATS:
        raise JobFileError(f"--output {output}: give {' or '.join(FORMATS)}")
    if file.suffix == ".py":
        raise JobFileError(f"{file}: a script is no TrainingJob; `everstep init {file}` writes one for it")
    objects = asyncio.run(_objects(load(file, (), Overrides()), namespace))
    if output == "json":
        say(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        say(yaml.safe_dump_all(objects, sort_keys=False), end="")


_SHOWN = (CreateService, CreateDisruptionBudget, CreateNetworkPolicy, CreatePodGroup, CreatePod)


async def _objects(job: Prepared, namespace: str | None) -> list[dict[str, Any]]:
    namespace = namespace or job.namespace
    client = MemoryCluster(_Clock(), namespaces=(namespace,)).client()
    body = {**job.manifest, "metadata": {**job.manifest["metadata"], "namespace": namespace}}
    try:
        await client.create(JOBS, namespace, body)
        read = await saved_snapshot.read_objects(client, namespace, job.name, now=CREATED, cluster="")
        seen = saved_snapshot.snapshot(read)
        # A chart may be installed so.
        may = replace(seen.settings, network_policies=True, pod_groups=frozenset(GangScheduler), volume_claims=True)
        seen = replace(seen, settings=may)
    except (KubeError, SpecError) as e:
        raise JobFileError(f"{job.name}: a cluster would refuse this job: {e}") from e
    decided = plan(seen)
    made = [action for stage in decided.stages for action in stage.actions if isinstance(action, _SHOWN)]
    claims = [claim for action in made if isinstance(action, CreatePod) for claim in action.claims]
    created = [*claims, *(action.body for action in made)]
    if not created:
        raise JobFileError(f"{job.name}: the operator would create nothing: {decided.reason}")
    for body in created:
        body["metadata"].pop("ownerReferences", None)  # the owner has a UID once the job is in a cluster
    return created
