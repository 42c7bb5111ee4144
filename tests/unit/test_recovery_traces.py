"""The trace of a recovery: a real exporter sends it to a real collector, and its spans are what the status says."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everstep.contract.messages import Phase, Report
from everstep_operator.api.conditions import Cause, Rung
from everstep_operator.api.status import RecoveryRecord
from everstep_operator.main import JOBS, Operator, main
from everstep_operator.settings import SettingsError, names_collector
from everstep_operator.telemetry.otlp import CLOSE_SECONDS, Traces
from everstep_operator.telemetry.recovery_trace import Incident, Outcome, RecoveryTrace
from support.operator.operator_stage import ELASTIC, JOB, Stage, form, replaced
from support.telemetry.collector import Collector

OWN_ROUNDS = {**ELASTIC, "spec": {**ELASTIC["spec"], "rendezvous": {"backend": "everstep"}}}
STAGES = {"detect": "detectMs", "form": "rendezvousMs", "restore": "restoreMs", "first-step": "firstStepMs"}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "everstep")


class Life:
    """A job whose workers the test plays."""

    def __init__(self, stage: Stage, operator: Operator, size: int) -> None:
        self.stage, self.operator, self.size = stage, operator, size

    def report(self, phase: Phase, rank: int, round_: int, **fields: Any) -> None:
        stored = self.operator.caches.jobs.get("default", "digits")
        assert stored is not None
        report = Report(phase, rank, self.size, at=1.0, round=round_, **fields)
        at_once = self.operator.reconciler.progress_of(stored).accept(report, self.stage.clock.now())
        self.operator.queue.add_after(("default", "digits"), 0.0 if at_once else 2.0)

    async def restore(self, round_: int, step: int, seconds: float = 1.5) -> None:
        await self.stage.clock.advance(seconds)
        for rank in range(self.size):
            self.report(Phase.RESTORE, rank, round_, restored_step=step, restore_seconds=seconds)

    async def train(self, round_: int, steps: range) -> None:
        for step in steps:
            await self.stage.clock.advance(0.8)
            for rank in range(self.size) if step == steps[0] else (0,):
                self.report(Phase.TRAIN, rank, round_, step=step, step_seconds=0.8)

    async def status(self) -> dict[str, Any]:
        return (await self.stage.client.get(JOBS, "default", "digits")).status

    async def begin(self) -> None:
        """Three workers under c10d have taken ten steps."""
        await self.stage.client.create(JOBS, "default", JOB)
        await self.stage.until("it runs", self.stage.run_pods)
        await self.restore(1, 0)
        await self.train(1, range(1, 11))

    async def lose(self, incarnation: int = 0) -> None:
        await self.stage.end(f"digits-w1-{incarnation}", 137, seconds_ago=3)
        pod = f"digits-w1-{incarnation + 1}"
        await self.stage.until("it is replaced", lambda: replaced(self.stage, pod))
        await self.stage.until("its pods run", self.running)

    async def running(self) -> bool:
        await self.stage.run_pods()
        pods = (await self.stage.pods()).values()
        return len(pods) == self.size and all(pod.status.phase == "Running" for pod in pods)


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_spans_at_a_collector_are_the_recovery_that_the_status_has(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team")
        traces = Traces("replica-0")
        stage.on_recovery = traces.send
        async with stage.operating() as operator:
            life = Life(stage, operator, 3)
            await life.begin()
            await stage.clock.advance(4)
            await life.lose()
            await life.restore(2, 6)
            await life.train(2, range(7, 9))
            (record,) = (await life.status())["recoveries"]
            assert "firstStepMs" in record, "the recovery is over"
            traces.flush()
            assert [s.attributes for s in collector.spans] == [], "the lost steps are being taken again"
            await life.train(2, range(9, 15))
            await stage.clock.advance(5)
        traces.close()
        ((root, children),) = collector.recoveries()
    assert list(children) == [*STAGES, "replay"]
    assert {name: children[name].milliseconds for name in STAGES} == {
        name: record[field] for name, field in STAGES.items()
    }
    assert record["restoreMs"] == 1500
    ordered = list(children.values())
    assert (root.start, root.end) == (ordered[0].start, ordered[-1].end)
    assert all(before.end == after.start for before, after in pairwise(ordered))
    noticed = datetime.fromisoformat(record["at"]).timestamp()
    assert noticed <= children["form"].start / 1e9 < noticed + 1
    # Steps 7 to 10 are repeated, 11 is new: four steps of 0.8 s from the first one on.
    assert children["replay"].milliseconds == pytest.approx(4 * 800, abs=100)
    job = await stage.client.get(JOBS, "default", "digits")
    assert root.attributes == {
        "k8s.namespace.name": "default",
        "everstep.job.name": "digits",
        "everstep.job.uid": job.metadata.uid,
        "everstep.recovery.cause": "Signaled",
        "everstep.recovery.rung": "recreate",
        "everstep.recovery.worker": 1,
        "everstep.recovery.round": 2,
        "everstep.recovery.lost_steps": record["lostSteps"],
        "everstep.recovery.outcome": "recovered",
    }
    assert root.error is None
    assert root.name == "recovery"
    assert root.resource["service.name"] == "everstep-operator"
    assert root.resource["service.instance.id"] == "replica-0"
    assert {header["x-tenant"] for header in collector.headers} == {"team"}


class Sent(list[RecoveryTrace]):
    """What an operator hands on."""

    def outcomes(self) -> list[str]:
        return [str(trace.outcome) for trace in self]


async def test_worker_that_is_replaced_alone_has_a_trace_as_soon_as_all_have_stepped(stage: Stage) -> None:
    sent = Sent()
    stage.on_recovery = sent.append
    async with stage.operating() as operator:
        life = Life(stage, operator, 4)
        job = await stage.client.create(JOBS, "default", OWN_ROUNDS)
        await stage.until("its pods run", life.running)
        await form(stage, operator, job, dict.fromkeys(range(4), 0))
        await life.train(1, range(1, 11))
        await life.lose()
        await form(stage, operator, job, {0: 0, 1: 1, 2: 0, 3: 0})
        await life.train(2, range(11, 13))
        await stage.until("it is over", lambda: sent)
        (record,) = (await life.status())["recoveries"]
        await life.train(2, range(13, 20))
    (trace,) = sent
    assert record["lostSteps"] == 0
    assert trace.outcome is Outcome.RECOVERED
    assert {stage.name: (stage.end - stage.start) / timedelta(milliseconds=1) for stage in trace.stages} == {
        name: record[field] for name, field in STAGES.items() if field in record
    }


@pytest.mark.parametrize("end", ["lost-again", "suspended", "deleted", "failed"])
async def test_recovery_that_is_cut_short_has_a_trace_that_says_how(stage: Stage, end: str) -> None:
    sent = Sent()
    stage.on_recovery = sent.append
    async with stage.operating() as operator:
        life = Life(stage, operator, 3)
        await life.begin()
        await life.lose()
        await stage.clock.advance(20)
        assert sent == []
        if end == "lost-again":
            await life.lose(1)
        elif end == "suspended":
            await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"suspend": True}})
        elif end == "deleted":
            await stage.client.delete(JOBS, "default", "digits", propagation="Background")
        else:
            await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"activeDeadlineSeconds": 1}})
        await stage.until("its trace is sent", lambda: sent)
        assert sent.outcomes() == [end]
        if end == "lost-again":
            await life.restore(3, 10)
            await life.train(3, range(11, 14))
            await stage.until("the second one is sent", lambda: len(sent) == 2)
            assert sent.outcomes() == [end, "recovered"]
    assert [span.name for span in sent[0].stages] == ["detect"]
    assert sent[0].recovery.end - sent[0].recovery.start >= timedelta(seconds=20)


async def test_replica_that_takes_over_ends_a_recovery_that_the_status_has(stage: Stage) -> None:
    sent = Sent()
    stage.on_recovery = sent.append
    async with stage.operating() as operator:
        life = Life(stage, operator, 3)
        await life.begin()
        await life.lose()
    assert sent == []
    async with stage.operating() as operator:
        await stage.until("it leads", operator.elector.is_leader)
        life.operator = operator
        await life.restore(2, 10)
        await life.train(2, range(11, 13))
        await stage.until("it is over", lambda: sent)
        (record,) = (await life.status())["recoveries"]
    assert sent.outcomes() == ["recovered"]
    (form,) = (span for span in sent[0].stages if span.name == "form")
    assert form.start == datetime.fromisoformat(record["at"])
    assert (form.end - form.start) / timedelta(milliseconds=1) == record["rendezvousMs"]


def incident() -> RecoveryTrace:
    record = RecoveryRecord(
        at=datetime(2026, 1, 1, tzinfo=UTC), cause=Cause.ERROR, rung=Rung.RECREATE, worker=0, node="n1", detect_ms=10,
        rendezvous_ms=10, restore_ms=10, first_step_ms=10, lost_steps=3,
    )  # fmt: skip
    seen = Incident("ml", "digits", "uid", record.at, record, 2)
    return seen.trace(record.at + timedelta(seconds=1), Outcome.LOST_AGAIN)


def test_collector_that_is_away_costs_neither_time_nor_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    with socket.socket() as silent:  # it takes connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
        traces, trace = Traces("replica-0"), incident()
        began = time.process_time()
        for _ in range(2000):
            traces.send(trace)
        assert (time.process_time() - began) / 2000 < 0.005, "seconds for a trace"
        began = time.monotonic()
        traces.close()
        assert time.monotonic() - began < CLOSE_SECONDS + 1


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/v1/traces", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
          "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)  # fmt: skip
def test_traces_are_sent_where_a_collector_is_named(environ: Mapping[str, str], wanted: bool) -> None:
    assert (names_collector(environ) is not None) is wanted


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"},
            "OTEL_EXPORTER_OTLP_ENDPOINT: 'collector:4317' is no URL such as http://collector:4318",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'grpc': traces are sent by http/protobuf alone, which collectors take at "
            "port 4318",
        ),
    ],
)
def test_collector_that_cannot_be_reached_by_http_is_refused(environ: Mapping[str, str], words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        names_collector(environ)
    assert str(refused.value) == words


def test_exporter_that_is_not_installed_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], "
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}"
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.delitem(sys.modules, "everstep_operator.telemetry.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert main(["--kubeconfig", str(config), "--namespace", "everstep-system"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("everstep-operator: OTEL_EXPORTER_OTLP_ENDPOINT: the package ")
    assert "pip install 'everstep-operator[otel]'" in printed
