"""Workers that wait for something outside of them, at a real API server: what the status says, and who is charged."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

NO_NODE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        }
    ],
}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


async def test_rendezvous_that_times_out_for_want_of_a_node_is_neither_charged_nor_counted(place: Place) -> None:
    """Worker 0 waits for worker 1, which finds no node, and gives up: more often than noProgressLimit allows."""
    await place.create_job(recovery={"noProgressLimit": 2})
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 137)
        for round_ in range(1, 5):
            await there(place, f"digits-w0-{round_}", f"digits-w1-{round_}")
            await place.set_pod(f"digits-w1-{round_}", NO_NODE)
            await place.start(f"digits-w0-{round_}")
            await place.end(f"digits-w0-{round_}", 1, message="RendezvousTimeoutError")
        await there(place, "digits-w0-5", "digits-w1-5")
        status = await place.status()
        assert {r["cause"] for r in status["recoveries"]} == {"PeerMissing", "Signaled"}
        assert status["restarts"]["userCode"] == 0
        assert status["restarts"].get("withoutProgress", 0) <= 1  # the kill
        await place.running("digits-w0-5", "digits-w1-5")


async def there(place: Place, *names: str) -> None:
    async def holds() -> bool:
        return await place.names() == sorted(names)

    await eventually(f"exactly {names} exist", holds)


async def test_suspended_time_counts_towards_no_deadline(place: Place) -> None:
    """Suspended for longer than activeDeadlineSeconds, with another operator that resumes it."""
    await place.create_job(activeDeadlineSeconds=6)
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        begun = (await place.status())["startTime"]
        await place.edit_job(suspend=True)
        await eventually("the job is suspended", lambda: reads(place, "Suspended"))
        assert "startTime" not in await place.status()
    ended = time.monotonic() + 7
    await eventually("the deadline would be over", lambda: time.monotonic() > ended)
    async with Operators(place).run():
        await place.edit_job(suspend=False)
        await place.running("digits-w0-2", "digits-w1-2")
        status = await place.status()
        assert status["startTime"] > begun
        assert status["earlierActiveSeconds"] <= 6
        await eventually("the deadline ends the job that is active for as long", lambda: reads(place, "Failed"))


async def reads(place: Place, reason: str) -> bool:
    return await place.reason() == reason


def conditions(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["type"]: c for c in status.get("conditions", ())}
