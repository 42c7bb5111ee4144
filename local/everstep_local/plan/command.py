"""`everstep plan`: what the operator would decide about a job, and why.

It takes a snapshot, plans with the operator's own planner, and prints. Invariant: it changes nothing in a cluster.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.printing import say, say_error
from everstep_local.plan import saved_snapshot
from everstep_local.plan import text as plan_text
from everstep_local.plan.saved_snapshot import JobObjects, SnapshotError
from everstep_local.plan.simulation.agents import ElasticWorld
from everstep_local.plan.simulation.cluster import World
from everstep_local.plan.simulation.transcript import TranscriptError, expected, replay
from everstep_operator.api.base import SpecError
from everstep_operator.kube.credentials import Cluster, KubeConfig, look_up
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.transport import HttpKubeClient
from everstep_operator.plan.planner import plan as decide

SECONDS = 60.0  # for all requests to an API server
DIFFERS = 1  # exit code: a transcript prints something else than it records
SIMULATIONS: dict[str, type[World]] = {"everstep": ElasticWorld, "c10d": World}


class PlanCommandError(Exception):
    """The command is wrong, or there is no answer. The text says what to do."""


app = typer.Typer(add_completion=False)
EXPECTED = (PlanCommandError, SnapshotError, KubeError)


@app.command()
def plan(
    job: Annotated[str | None, typer.Argument(help="A TrainingJob of the cluster.")] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="The job's namespace.")] = "default",
    kubeconfig: Annotated[
        str | None, typer.Option(metavar="FILE", help="Instead of $KUBECONFIG or ~/.kube/config.")
    ] = None,
    context: Annotated[str | None, typer.Option(metavar="NAME", help="Instead of the current context.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the snapshot of JOB in a file.")] = None,
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan on a snapshot that --save kept; asks no cluster.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Play a transcript on a simulated cluster.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Of a transcript's simulated job: everstep or c10d.")
    ] = "everstep",
    output: Annotated[str, typer.Option("--output", "-o", help="text or json")] = "text",
) -> None:  # fmt: skip
    """Show what the operator would decide about a job now, and why. Changes nothing."""
    if output not in ("text", "json"):
        raise PlanCommandError(f"--output {output}: give text or json")
    if replay is not None:
        if job is not None or snapshot is not None or save is not None:
            raise PlanCommandError("--replay plays a transcript: give neither JOB nor --snapshot nor --save with it")
        raise typer.Exit(_replay(replay, backend))
    if snapshot is not None:
        if save is not None:
            raise PlanCommandError("--save keeps what was read from a cluster: leave it out with --snapshot")
        objects = saved_snapshot.load(snapshot)
        if job is not None and job != objects.job.metadata.name:
            raise PlanCommandError(f"{snapshot} is of TrainingJob {objects.job.metadata.name}, not of {job}")
    elif job is not None:
        path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
        objects = asyncio.run(_from_cluster(job, namespace, look_up(KubeConfig(path, context))))
        if save is not None:
            saved_snapshot.save(objects, save)
    else:
        raise PlanCommandError("name a TrainingJob, or give --snapshot FILE or --replay FILE")
    _print(objects, output)


def _print(objects: JobObjects, output: str) -> None:
    name = objects.job.metadata.name
    try:
        seen = saved_snapshot.snapshot(objects)
    except SpecError as e:
        raise PlanCommandError(f"the operator cannot carry out TrainingJob {name}, and leaves it as it is: {e}") from e
    decided = decide(seen)
    if output == "json":
        say(json.dumps(plan_text.as_json(seen, decided), indent=2))
        return
    say(plan_text.as_text(seen, decided, objects.cluster))
    if objects.nodes_hidden:
        say_error("note: you may not read nodes; each was taken to be Ready")


async def _from_cluster(job: str, namespace: str, cluster: Cluster) -> JobObjects:
    try:
        async with asyncio.timeout(SECONDS), HttpKubeClient(cluster.source) as client:
            return await saved_snapshot.read_objects(
                client, namespace, job, now=datetime.now(UTC), cluster=str(cluster)
            )
    except TimeoutError as e:
        raise PlanCommandError(f"{cluster} did not answer within {SECONDS:g} s: is its API server reachable?") from e


def _replay(path: Path, backend: str) -> int:
    if backend not in SIMULATIONS:
        raise PlanCommandError(f"--backend {backend}: give {' or '.join(SIMULATIONS)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise PlanCommandError(f"{path}: cannot be read: {e}") from e
    try:
        now = replay(SIMULATIONS[backend](), text)
    except TranscriptError as e:
        raise PlanCommandError(f"{path}: {e} (simulated with --backend {backend})") from e
    say(now, end="")
    before = expected(text, now)
    if before == now:
        return 0
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "recorded", "now", lineterm="")
    say_error("\n".join([f"everstep: {path} records something else:", *lines]))
    return DIFFERS
