"""A finished job runs again at a real API server, with its document of rounds begun anew (ADR 0064)."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.contract.document import FINISHED, Document, Member, Sizes, decode, encode
from everstep_operator.kube.errors import Invalid
from everstep_operator.kube.resources import CONFIGMAPS
from everstep_operator.main import JOBS
from everstep_operator.rounds.documents import JobRef, RoundDocuments
from support.apiserver.operators import NewPlace, Operators, Place
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

URL = {"url": "file:///commits"}
WRITES = 14  # more than an operator writes from the wish to the second end


async def has_ended(place: Place, reason: str) -> None:
    async def holds() -> bool:
        return await place.reason() == reason

    await eventually(f"the job is {reason}", holds)


async def fail(place: Place) -> None:
    await place.running("digits-w0-0", "digits-w1-0")
    await place.end("digits-w1-0", 1, message="OSError: the store is full")
    await has_ended(place, "Failed")


async def succeed(place: Place, *names: str) -> None:
    await place.running(*names)
    for name in names:
        await place.end(name, 0)
    await has_ended(place, "Complete")


def without_times(status: dict[str, Any]) -> Any:
    run = {
        key: value
        for key, value in status["history"][0].items()
        if key not in ("startedAt", "endedAt", "activeSeconds")
    }
    return status["rerun"], run, status["restarts"]["total"], status.get("failure"), status["recoveries"]


async def test_failed_job_that_is_mended_ends_complete_with_its_history(place: Place) -> None:
    await place.create_job(checkpoint=URL, recovery={"maxRestarts": 0}, ttlSecondsAfterFinished=3600)
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        with pytest.raises(Invalid, match="can only be raised once the job has finished"):
            await place.edit_job(rerun=1)
        await fail(place)
        await place.edit_job(rerun=1, template={"metadata": {"labels": {"mended": "yes"}}})
        await succeed(place, "digits-w0-2", "digits-w1-2")
        status = await place.status()
        assert status["completionTime"] >= status["history"][0]["endedAt"]
        assert without_times(status) == (
            1,
            {
                "rerun": 0,
                "outcome": "RestartBudgetExhausted",
                "restarts": 0,
                "message": status["history"][0]["message"],
            },
            0,
            None,
            [],
        )
        assert "OSError: the store is full" in status["history"][0]["message"]
        assert "JobRerun" in await place.events()


async def test_job_that_nobody_reruns_in_time_is_deleted(place: Place) -> None:
    await place.create_job(ttlSecondsAfterFinished=1)
    async with Operators(place).run():
        await succeed(place, "digits-w0-0", "digits-w1-0")

        async def gone() -> bool:
            return (await place.client.list(JOBS, place.namespace)).items == ()

        await eventually("the job is gone", gone)


@pytest.mark.long
async def test_operator_that_dies_after_any_write_of_a_rerun_changes_nothing_in_its_end(new_place: NewPlace) -> None:
    for writes in range(WRITES):
        place = await new_place()
        await place.create_job(checkpoint=URL, recovery={"maxRestarts": 0})
        async with Operators(place).run():
            await fail(place)
        await place.edit_job(rerun=1)
        async with Operators(place).run(dies_after=writes) as client:

            async def dead_or_pods(client: Any = client, place: Place = place) -> bool:
                return client.dead.is_set() or "digits-w1-2" in await place.names()

            await eventually("the operator is dead, or has made the pods", dead_or_pods)
        async with Operators(place).run():
            await succeed(place, "digits-w0-2", "digits-w1-2")
        status = await place.status()
        assert (status["rerun"], len(status["history"]), status["world"]["round"]) == (1, 1, 3), (
            f"after {writes} writes"
        )


async def test_document_of_rounds_is_begun_anew_and_the_workers_have_new_names(place: Place) -> None:
    job = await place.create_job(checkpoint=URL, rendezvous={"backend": "everstep"}, podCleanup="None")
    ref = JobRef(place.namespace, "digits", job.metadata.uid)
    documents = RoundDocuments(place.client, JOBS, require_leading=lambda: None)
    async with Operators(place).run():

        async def there() -> bool:
            return await place.names() == ["digits-w0-0", "digits-w1-0"]

        await eventually("two pods are made", there)
    stored = await documents.load(ref)
    number = await documents.publish(ref, 0)
    members = tuple(Member(index, f"agent-{index}") for index in range(2))
    closed = Document(Sizes(2, 2), round=number, members=members, done=("agent-0", "agent-1"), closed=FINISHED)
    assert await documents.store(ref, stored.version, encode(closed).decode()) is not None
    for name in ("digits-w0-0", "digits-w1-0"):
        await place.start(name)
        await place.end(name, 0)
    async with Operators(place).run():
        await has_ended(place, "Complete")
        await place.edit_job(rerun=1)

        async def begun() -> bool:
            return await place.names() == ["digits-w0-1", "digits-w1-1"]

        await eventually("the workers of the rerun are made", begun)
    kept = await place.client.get(CONFIGMAPS, place.namespace, "digits-rounds")
    assert decode(kept.data["document"].encode()) == Document(Sizes(2, 2), ruled=True)
    assert await documents.publish(ref, 0) == number + 1, "rounds go on"
