"""The events that a person sees of a job, as the real operator writes them on the in-memory cluster."""

from __future__ import annotations

import pytest

from everstep.contract.messages import Phase, Report
from everstep_operator.controller import record
from everstep_operator.kube.resources import EVENTS
from everstep_operator.kube.wire import Event
from everstep_operator.main import JOBS
from support.operator.operator_stage import JOB, Stage, send


async def test_commits_name_a_step_and_are_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    window = 60
    monkeypatch.setattr(record, "SERIES_SECONDS", window)
    stage = Stage()

    async def commits() -> list[Event]:
        events = (await stage.client.list(EVENTS, "default")).items
        return sorted((e for e in events if e.reason == "CheckpointCommitted"), key=lambda e: str(e.event_time))

    async def pass_seconds(seconds: float) -> None:
        end = stage.clock.monotonic() + seconds
        while stage.clock.monotonic() < end:
            await stage.clock.advance(5)  # a greater leap would cost the operator its lease

    async with stage.operating() as operator:
        await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        await pass_seconds(window - stage.clock.now().timestamp() % window)
        for step in (10, 20, 30):
            report = Report(Phase.TRAIN, 0, 3, at=1.0, round=1, step=step, committed_step=step)
            assert await send(stage, operator, "digits-w0-0", report) == 204

            async def stored(step: int = step) -> bool:
                status = (await stage.client.get(JOBS, "default", "digits")).status
                return bool((status.get("checkpoint") or {}).get("lastCommittedStep") == step)

            await stage.until("the commit is in the status", stored)
            if step == 20:
                await pass_seconds(window)

        async def two() -> bool:
            return len(await commits()) == 2

        await stage.until("the events are written", two)
        notes = [(e.note, e.series.count if e.series is not None else 1) for e in await commits()]
    later = "; for ten minutes this event counts the following commits, and status.checkpoint.lastCommittedStep has "
    later += "the newest"
    assert notes == [
        (f"committed step 10{later}", 2),
        (f"committed step 30{later}", 1),
    ]
