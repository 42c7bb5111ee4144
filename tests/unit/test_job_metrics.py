"""The metrics of single jobs and nodes: their values, and that nothing is left of a job that is gone."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everstep.contract import process_end
from everstep.contract.messages import Phase, Report
from everstep.jobs.costs import by_node
from everstep.jobs.view import of_objects
from everstep_local.nodes.scheduler import BINDINGS
from everstep_operator.api.conditions import Cause
from everstep_operator.api.status import ExcludedNode, Status
from everstep_operator.controller.figures import MAX_JOBS, MAX_NODES, NodeLosses, exclusions
from everstep_operator.controller.progress import JobProgress
from everstep_operator.kube.resources import EVENTS, LEASES, NODES
from everstep_operator.main import JOBS, Operator
from everstep_operator.page import rows
from everstep_operator.plan.outcome import LostWorker
from support.clocks.manual import ManualClock
from support.operator.operator_stage import ELASTIC, JOB, Stage, form, replaced, samples, send, withdraw

START = datetime(2026, 1, 1, tzinfo=UTC)
OWN_ROUNDS = {**ELASTIC, "spec": {**ELASTIC["spec"], "rendezvous": {"backend": "everstep"}}}
DIGITS = "digits default"  # the labels in the order of their names


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "everstep")


def ours(operator: Operator) -> dict[str, float]:
    """The samples of jobs and nodes, without those of `everstep_jobs`."""
    return {
        name: value
        for name, value in samples(operator.metrics).items()
        if name.startswith(("everstep_job_", "everstep_node_"))
    }


async def train(stage: Stage, operator: Operator, round_: int, step: int, *pods: str, **more: Any) -> None:
    for rank, pod in enumerate(pods):
        report = Report(Phase.TRAIN, rank, len(pods), at=1.0, round=round_, step=step, step_seconds=0.5, **more)
        assert await send(stage, operator, pod, report) == 204


async def four(stage: Stage) -> bool:
    return len(await stage.pods()) == 4


async def run_on_nodes(stage: Stage) -> None:
    """Each of the four pods runs, on a node of its own."""
    for index in range(4):
        bound = {"metadata": {"name": f"digits-w{index}-0"}, "target": {"kind": "Node", "name": f"node-{index}"}}
        await stage.client.create(BINDINGS, "default", bound)
    await stage.run_pods()


async def test_loss_is_seen_in_the_figures_of_its_job_and_its_node() -> None:
    stage = Stage()
    async with stage.operating() as operator:
        job = await stage.client.create(JOBS, "default", OWN_ROUNDS)
        await stage.until("the pods are there", lambda: four(stage))
        for index in range(4):
            ready = [{"type": "Ready", "status": "True"}]
            await stage.client.create(NODES, None, {"metadata": {"name": f"node-{index}"}})
            await stage.client.patch_status(NODES, None, f"node-{index}", {"conditions": ready})
        await run_on_nodes(stage)
        await form(stage, operator, job, dict.fromkeys(range(4), 0))
        everybody = [f"digits-w{i}-0" for i in range(4)]
        await train(stage, operator, 1, 1, *everybody)
        await stage.clock.advance(30)
        await train(stage, operator, 1, 10, *everybody, committed_step=8, committed_at=1e9)
        stepped = stage.clock.now().timestamp()
        await stage.until("it trains", lambda: ours(operator).get(f"everstep_job_workers {DIGITS}") == 4)
        seen = ours(operator)
        recoveries = [name for name in seen if name.startswith("everstep_job_recoveries_total ")]
        assert [seen[name] for name in recoveries] == [0] * len(Cause), "the first recovery is an increase"
        assert seen[f"everstep_job_step {DIGITS}"] == 10
        assert stepped - 1 <= seen[f"everstep_job_last_step_timestamp_seconds {DIGITS}"] <= stepped
        assert START.timestamp() <= seen[f"everstep_job_start_timestamp_seconds {DIGITS}"] <= stepped
        assert seen[f"everstep_job_last_commit_step {DIGITS}"] == 8
        assert seen[f"everstep_job_last_commit_timestamp_seconds {DIGITS}"] == 1e9
        assert seen[f"everstep_job_workers_wanted {DIGITS}"] == 4
        assert {
            f"everstep_node_losses_total node-{i}": seen[f"everstep_node_losses_total node-{i}"] for i in range(4)
        } == {f"everstep_node_losses_total node-{i}": 0 for i in range(4)}

        # Training stands still. The reports of a step that was there before move nothing.
        await stage.clock.advance(30)
        await train(stage, operator, 1, 10, "digits-w0-0")
        frozen = f"everstep_job_last_step_timestamp_seconds {DIGITS}"
        assert ours(operator)[frozen] == seen[frozen]

        await stage.end("digits-w1-0", 137)
        await stage.until("it is replaced", lambda: replaced(stage, "digits-w1-1"))
        assert ours(operator)[f"everstep_job_workers {DIGITS}"] == 0
        assert ours(operator)["everstep_job_recoveries_total Signaled digits default"] == 1
        assert ours(operator)["everstep_node_losses_total node-1"] == 1
        await form(stage, operator, job, {0: 0, 1: 1, 2: 0, 3: 0})
        await train(stage, operator, 2, 9, "digits-w0-0", "digits-w1-1", "digits-w2-0", "digits-w3-0")
        first_step = f"everstep_job_last_recovery_seconds {DIGITS} first-step"
        await stage.until("it has recovered", lambda: first_step in ours(operator))
        seen = ours(operator)
        productive = seen[f"everstep_job_seconds_total {DIGITS} productive"]
        active = stage.clock.now().timestamp() - seen[f"everstep_job_start_timestamp_seconds {DIGITS}"]
        assert seen[f"everstep_job_goodput_ratio {DIGITS}"] == pytest.approx(productive / active)
        assert productive > 25
        stages = [v for name, v in seen.items() if name.startswith("everstep_job_last_recovery_seconds")]
        (record,) = (await stage.client.get(JOBS, "default", "digits")).status["recoveries"]
        recorded = [record.get(f"{part}Ms") for part in ("detect", "rendezvous", "restore", "firstStep")]
        assert sorted(stages) == sorted(value / 1000 for value in recorded if value is not None)
        assert seen[frozen] < stage.clock.now().timestamp() - 30, "step 9 is no new step"
        before = {name: value for name, value in seen.items() if "_node_" not in name and "goodput" not in name}

        # Autoscalers delete nodes, and new ones have new names.
        await stage.client.delete(NODES, None, "node-1")
        await stage.until("its series has gone", lambda: "everstep_node_losses_total node-1" not in ours(operator))

    # The next leader knows it from the status.
    async with stage.operating() as operator:
        await stage.until("it has looked", lambda: f"everstep_job_step {DIGITS}" in ours(operator))
        now = {name: value for name, value in ours(operator).items() if name in before}
        assert now == pytest.approx(before, rel=0, abs=1)


async def test_process_that_an_agent_replaces_costs_one_number_wherever_it_is_shown() -> None:
    stage = Stage()
    async with stage.operating() as operator:
        job = await stage.client.create(JOBS, "default", OWN_ROUNDS)
        await stage.until("the pods are there", lambda: four(stage))
        await run_on_nodes(stage)
        pods = [f"digits-w{i}-0" for i in range(4)]
        await form(stage, operator, job, dict.fromkeys(range(4), 0))
        await train(stage, operator, 1, 10, *pods)
        await stage.until("it trains", lambda: ours(operator).get(f"everstep_job_workers {DIGITS}") == 4)

        why = process_end.of_rank(1, process_end.hung(11, 40, " at train.py:9 in step"))
        await withdraw(stage, operator, job, (1, 0), why)
        counted = "everstep_job_recoveries_total Signaled digits default"
        await stage.until("it is recorded", lambda: ours(operator)[counted] == 1)
        assert ours(operator)["everstep_node_losses_total node-1"] == 1
        await stage.clock.advance(5)
        await form(stage, operator, job, {0: 0, 2: 0, 3: 0})
        await stage.clock.advance(2)
        await train(stage, operator, 2, 11, pods[0], pods[2], pods[3])
        shrunk = "everstep_recoveries_total Signaled shrink"
        await stage.until("it has recovered", lambda: samples(operator.metrics)[shrunk] == 1)

        seen = await stage.client.get(JOBS, "default", "digits")
        (record,) = seen.status["recoveries"]
        assert (record["worker"], record["node"], record["step"], record["lostSteps"]) == (1, "node-1", 10, 0)
        assert record["detectMs"] == 40_000
        seconds = samples(operator.metrics)["everstep_recovery_seconds_sum"]
        assert 47 <= seconds < 50
        (node,) = by_node(
            [("here", of_objects({"metadata": {"name": "digits"}, "status": seen.status}))], stage.clock.now()
        )
        assert node.node == "node-1"
        assert node.seconds == pytest.approx(seconds)
        (row,) = rows.recoveries(of_objects({"metadata": {"name": "digits"}, "status": seen.status}))
        assert row.seconds == rows.span(seconds)
        stages = [v for name, v in ours(operator).items() if name.startswith("everstep_job_last_recovery_seconds")]
        assert sum(stages) == pytest.approx(seconds)
        notes = {event.reason: event.note for event in (await stage.client.list(EVENTS, "default")).items}
        assert notes["WorkerLost"] == (
            "worker 1 on node-1 lost a process (Signaled): rank 1 made no progress in step 11 for 40 s at train.py:9 "
            "in step; its agent starts another in the same pod"
        )
        took = f"training resumed with 3 workers {seconds:.1f} s after worker 1 was lost (Signaled); no steps repeated"
        assert notes["WorldResized"] == took

        await form(stage, operator, job, dict.fromkeys(range(4), 0))
        await train(stage, operator, 3, 12, *pods)
        regrown = "everstep_recoveries_total Signaled regrow"
        await stage.until("it is whole", lambda: samples(operator.metrics)[regrown] == 1)
        assert ours(operator)[counted] == 1


class Trace:
    """How long a job was in each state, by what the test itself does."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._since, self._state = clock.now(), ""
        self.seconds: dict[str, float] = {}

    def enter(self, state: str) -> None:
        now = self._clock.now()
        if self._state:
            spent = (now - self._since).total_seconds()
            self.seconds[self._state] = self.seconds.get(self._state, 0.0) + spent
        self._since, self._state = now, state


class Life:
    """A job whose workers the test plays, beside a trace of what it lets them do."""

    def __init__(self, stage: Stage, operator: Operator, size: int) -> None:
        self._stage, self._size = stage, size
        self.operator = operator
        self.trace = Trace(stage.clock)

    def report(self, phase: Phase, rank: int, round_: int, **fields: Any) -> None:
        """Over HTTP virtual time passes until the answer, and the trace could not say when the report was taken."""
        found = self.operator.caches.jobs.get("default", "digits")
        assert found is not None
        report = Report(phase, rank, self._size, at=1.0, round=round_, **fields)
        at_once = self.operator.reconciler.progress_of(found).accept(report, self._stage.clock.now())
        self.operator.queue.add_after(("default", "digits"), 0.0 if at_once else 2.0)

    async def restore(self, round_: int, step: int) -> None:
        """Each rank reads its state for five seconds."""
        self.trace.enter("restore")
        await self._stage.clock.advance(5)
        for rank in range(self._size):
            self.report(Phase.RESTORE, rank, round_, restored_step=step, restore_seconds=5.0)

    async def train(self, round_: int, state: str, steps: range) -> None:
        self.trace.enter(state)
        for step in steps:
            await self._stage.clock.advance(0.8)
            for rank in range(self._size) if step == steps[0] else (0,):
                self.report(Phase.TRAIN, rank, round_, step=step, step_seconds=0.8)

    def check(self) -> None:
        """Each state agrees with the trace within a reporting interval, and the sum within 1 %."""
        self.trace.enter("next")
        prefix, wanted = f"everstep_job_seconds_total {DIGITS} ", self.trace.seconds
        seen = {n.removeprefix(prefix): v for n, v in ours(self.operator).items() if n.startswith(prefix)}
        pairs = {state: (seen.get(state, 0.0), wanted.get(state, 0.0)) for state in {*seen, *wanted}}
        assert not {state: pair for state, pair in pairs.items() if abs(pair[0] - pair[1]) > 1}
        assert sum(seen.values()) == pytest.approx(sum(wanted.values()), rel=0.01)


async def test_seconds_of_a_life_with_a_loss_are_those_of_an_independent_trace() -> None:
    stage = Stage()
    spec = {name: value for name, value in OWN_ROUNDS["spec"].items() if name != "elastic"}
    async with stage.operating() as operator:
        await stage.until("it leads", operator.elector.is_leader)
        life = Life(stage, operator, 4)
        life.trace.enter("wait")
        job = await stage.client.create(JOBS, "default", {**OWN_ROUNDS, "spec": spec})
        await stage.clock.advance(20)
        await stage.run_pods()
        life.trace.enter("form")
        await stage.clock.advance(10)
        await form(stage, operator, job, dict.fromkeys(range(4), 0))
        await stage.clock.advance(6)
        await life.restore(1, 0)
        await life.train(1, "productive", range(1, 101))
        life.trace.enter("detect")
        await stage.clock.advance(12)
        await stage.end("digits-w1-0", 137)
        await stage.until("it is replaced", lambda: exists(stage, "digits-w1-1"))
        life.trace.enter("wait")
        await stage.clock.advance(30)
        await stage.run_pods()
        life.trace.enter("form")
        await stage.clock.advance(8)
        await form(stage, operator, job, {0: 0, 1: 1, 2: 0, 3: 0})
        await stage.clock.advance(6)
        await life.restore(2, 60)
        await life.train(2, "replay", range(61, 101))
        await life.train(2, "productive", range(101, 201))
        life.check()
        await stage.clock.advance(6)  # the status is written
        written = (await stage.client.get(JOBS, "default", "digits")).status["stateSeconds"]
        assert sum(written.values()) == pytest.approx(sum(life.trace.seconds.values()), rel=0.03)

    # Another leader goes on from the status, and what nobody saw was training.
    life.trace.enter("productive")
    life.trace.seconds["productive"] += life.trace.seconds.pop("next")
    async with stage.operating() as operator:
        await stage.until("it leads", operator.elector.is_leader)
        life.operator = operator
        await life.train(2, "productive", range(201, 231))
        life.check()


async def test_seconds_under_c10d_and_without_suspended_time() -> None:
    stage = Stage()
    async with stage.operating() as operator:
        await stage.until("it leads", operator.elector.is_leader)
        life = Life(stage, operator, 3)
        life.trace.enter("wait")
        await stage.client.create(JOBS, "default", JOB)
        await stage.clock.advance(20)
        await stage.run_pods()
        life.trace.enter("form")
        await stage.clock.advance(10)
        await life.restore(1, 0)
        await life.train(1, "productive", range(1, 101))
        life.trace.enter("detect")
        await stage.clock.advance(12)
        await stage.end("digits-w1-0", 137)
        await stage.until("all are replaced", lambda: exists(stage, "digits-w1-1"))
        life.trace.enter("wait")
        await stage.clock.advance(30)
        await stage.run_pods()
        life.trace.enter("form")
        await stage.clock.advance(10)
        await life.restore(2, 60)
        await life.train(2, "replay", range(61, 101))
        await life.train(2, "productive", range(101, 151))
        life.check()
        life.trace.enter("suspended")
        await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"suspend": True}})
        await stage.clock.advance(500)
        for name in await stage.pods():
            await stage.end(name, 0)
        await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"suspend": False}})
        await stage.until("its pods are there", lambda: exists(stage, "digits-w1-3"))
        life.trace.enter("wait")
        await stage.clock.advance(15)
        life.trace.enter("next")
        del life.trace.seconds["suspended"]
        del life.trace.seconds["next"]
        life.check()


async def exists(stage: Stage, pod: str) -> bool:
    return pod in await stage.pods()


@pytest.mark.parametrize(("end", "outcome"), [("complete", "Complete"), ("overdue", "DeadlineExceeded")])
async def test_end_of_a_job_is_counted_once_and_stays_when_the_job_is_gone(end: str, outcome: str) -> None:
    stage = Stage()
    async with stage.operating() as operator:
        await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        counter = f"everstep_jobs_ended_total {outcome}"
        assert samples(operator.metrics)[counter] == 0
        if end == "overdue":
            await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"activeDeadlineSeconds": 1}})
        else:
            for name in await stage.pods():
                await stage.end(name, 0)
        await stage.until("it has ended", lambda: samples(operator.metrics)[counter] == 1)
        await stage.client.delete(JOBS, "default", "digits", propagation="Background")
        await stage.clock.advance(30)
        ended = {n: v for n, v in samples(operator.metrics).items() if n.startswith("everstep_jobs_ended_total")}
        assert {name: value for name, value in ended.items() if value} == {counter: 1}


@pytest.mark.parametrize("end", ["complete", "deleted", "not leading", "replaced"])
async def test_series_of_a_job_end_with_it(end: str) -> None:
    stage = Stage()
    async with stage.operating() as operator:
        await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        assert ours(operator)[f"everstep_job_workers {DIGITS}"] == 3
        if end == "complete":
            for name in await stage.pods():
                await stage.end(name, 0)
        elif end == "deleted":
            await stage.client.delete(JOBS, "default", "digits", propagation="Background")
        elif end == "not leading":
            await stage.client.merge_patch(
                LEASES, "default", "everstep-operator", {"spec": {"holderIdentity": "somebody", "leaseTransitions": 9}}
            )
        else:
            await stage.client.delete(JOBS, "default", "digits", propagation="Background")
            await stage.client.create(JOBS, "default", {**JOB, "spec": {**JOB["spec"], "suspend": True}})  # type: ignore[dict-item]

        def ended() -> bool:
            now = ours(operator)
            if end == "replaced":
                return now.get(f"everstep_job_workers_wanted {DIGITS}") == 0
            return not now

        await stage.until("they are gone", ended)


def test_last_step_is_the_last_new_one_also_for_the_next_leader() -> None:
    def at(seconds: float) -> datetime:
        return START + timedelta(seconds=seconds)

    def trained(step: int, round_: int = 1) -> Report:
        return Report(Phase.TRAIN, 0, 1, at=0.0, round=round_, step=step)

    progress = JobProgress(Status(), START)
    progress.accept(trained(5), at(1))
    progress.accept(trained(5), at(2))
    progress.accept(trained(3, round_=2), at(3))  # after a loss
    assert progress.snapshot().stepped_at == at(1)
    progress.accept(trained(6, round_=2), at(4))
    assert progress.snapshot().stepped_at == at(4)
    status = Status.model_validate({"progress": {"step": 6, "steppedAt": at(4), "updatedAt": at(9)}})
    assert JobProgress(status, at(10)).snapshot().stepped_at == at(4)


def test_nodes_that_lost_workers_last_are_counted_and_those_of_decisions_are_not() -> None:
    losses = NodeLosses()
    for number in range(MAX_NODES + 5):
        losses.add(LostWorker(Cause.NODE_LOST, f"node-{number}"))
        losses.add(LostWorker(Cause.SIGNALED, "bad"))
    losses.add(LostWorker(Cause.DISRUPTION_TARGET, "drained"))
    losses.add(LostWorker(Cause.POD_DELETED, "deleted"))
    losses.add(LostWorker(Cause.NODE_LOST, None))
    counted = losses.by_node(f"idle-{number}" for number in range(MAX_NODES))
    assert len(counted) == MAX_NODES
    assert counted["bad"] == MAX_NODES + 5
    assert "node-0" not in counted
    assert not counted.keys() & {"drained", "deleted"}
    assert NodeLosses().by_node(["a"]) == {"a": 0}
    losses.keep({"bad", "node-4"})
    assert losses.by_node([]) == {"bad": MAX_NODES + 5}, "a node that is gone has no series"


def test_jobs_that_avoid_a_node_are_counted_and_the_nodes_are_bounded() -> None:
    def avoiding(*names: str) -> Status:
        return Status(excluded_nodes=tuple(ExcludedNode(name=name) for name in names))

    assert exclusions([avoiding("bad"), avoiding("bad", "worse"), Status()], ["good", "bad"]) == {
        "bad": 2,
        "worse": 1,
        "good": 0,
    }
    many = [avoiding("bad"), *(avoiding("bad", f"node-{number}") for number in range(MAX_NODES))]
    counted = exclusions(many, [f"idle-{number}" for number in range(MAX_NODES)])
    assert len(counted) == MAX_NODES
    assert counted["bad"] == MAX_NODES + 1


async def test_jobs_beyond_the_bound_are_counted_and_a_scrape_takes_less_than_100_ms() -> None:
    stage = Stage()
    async with stage.operating() as operator:
        await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        (memory,) = operator.reconciler._memory.values()
        # All are the one job, so that each is known to the cache of jobs.
        operator.reconciler._memory = dict.fromkeys((_Name("default", n) for n in range(MAX_JOBS + 7)), memory)  # type: ignore[arg-type]
        took = []
        for _ in range(5):
            began = time.process_time()
            text = operator.metrics.render().decode()
            took.append(time.process_time() - began)
        assert text.count("\neverstep_job_workers{") == MAX_JOBS
        assert "\neverstep_jobs_without_series 7\n" in text
        assert min(took) < 0.1


class _Name(tuple[str, str]):
    """A key that is different from the others, and names the same job."""

    def __new__(cls, namespace: str, number: int) -> _Name:
        made = super().__new__(cls, (namespace, "digits"))
        made.number = number
        return made

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and other.number == self.number

    number: int
