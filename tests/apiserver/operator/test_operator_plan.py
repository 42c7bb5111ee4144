"""`everstep plan` at a real API server: it says what the operator does next, and changes nothing itself."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver


async def everstep_plan(crd: Any, place: Place, *arguments: object) -> str:
    """Its standard output."""
    command = [sys.executable, "-m", "everstep.cli.main", "plan", "digits", "--namespace", place.namespace]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--kubeconfig", str(crd.kubeconfig), *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def everything(place: Place) -> dict[str, str]:
    """Resource versions of the job and its pods."""
    job = await place.job()
    pods = {name: pod.metadata.resource_version for name, pod in (await place.pods()).items()}
    return {**pods, "job": job.metadata.resource_version}


@pytest.mark.long
async def test_plan_for_a_lost_worker_changes_nothing_and_is_what_the_operator_then_does(
    crd: Any, place: Place, tmp_path: Path
) -> None:
    await place.create_job(recovery={"backoffSeconds": {"initial": 0, "max": 0}})
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
    await place.end("digits-w1-0", 137)
    before = await everything(place)
    kept = tmp_path / "kept.json"
    said = json.loads(await everstep_plan(crd, place, "-o", "json", "--save", kept))
    assert await everything(place) == before
    again = json.loads(await everstep_plan(crd, place, "-o", "json", "--snapshot", kept))
    assert again == said

    actions = [action for stage in said["stages"] for action in stage["actions"]]
    created = sorted(action.split()[2] for action in actions if action.startswith("create pod"))
    deleted = sorted(action.split()[2] for action in actions if action.startswith("delete pod"))
    assert deleted == ["digits-w0-0", "digits-w1-0"]
    async with Operators(place).run():
        await place.running("digits-w0-1", "digits-w1-1")

        async def told() -> bool:
            return "WorkerLost" in await place.events()

        await eventually("the event that the plan has", told)
    assert any("event Warning WorkerLost" in event for event in said["events"])
    assert created == sorted(await place.names())
    text = await everstep_plan(crd, place)
    assert "The operator would change nothing." in text or "write the status" in text
    assert "delete pod" not in text


@pytest.mark.long
async def test_job_that_is_not_there_is_named_with_its_namespace(crd: Any, place: Place) -> None:
    with pytest.raises(AssertionError, match=f"no TrainingJob digits in namespace {place.namespace}"):
        await everstep_plan(crd, place)
