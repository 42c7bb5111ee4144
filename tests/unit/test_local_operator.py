"""The real operator on the in-memory cluster: a job's life on a virtual clock, with a kubelet of a few lines."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import types
from collections import deque
from functools import partial
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from everstep.contract.document import JoinRequest, Member, Sizes
from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep.contract.rounds import DOCUMENT_PATH, PRESENCE_PATH, TTL_HEADER, VERSION_HEADER
from everstep_local.apiserver.faults import Delay, Expire, Faults, LoseAnswer, Refuse
from everstep_operator.api.events import EventReason
from everstep_operator.kube.resources import CONFIGMAPS, EVENTS, LEASES, PDBS, PODS, SERVICES
from everstep_operator.kube.wire import Pod, controller_uid
from everstep_operator.main import JOBS, Operator
from everstep_operator.rounds.agent_lookup import Agent
from everstep_operator.rounds.documents import JobRef
from everstep_operator.rounds.presence import Worker
from everstep_operator.settings import OperatorSettings
from everstep_operator.telemetry.metrics import ROUND_CALLS, Metrics
from support.operator.operator_stage import ELASTIC, JOB, Stage, call, form, replaced, samples, send


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "everstep")  # given back after the test


async def test_memory_is_settled_once_with_full_caches_before_the_operator_leads() -> None:
    stage = Stage()
    async with stage.operating() as operator:
        await stage.until("it leads", operator.elector.is_leader)
        assert stage.synced == [True]
        await stage.clock.advance(60)
    assert stage.synced == [True]


def test_settled_memory_is_left_out_of_collections() -> None:
    program = """
import gc, inspect
from everstep_operator.main import Operator
from everstep_operator.runtime.garbage_collection import YOUNG, freeze_startup_objects

assert inspect.signature(Operator).parameters["synced"].default is freeze_startup_objects
before = len(gc.get_objects())
freeze_startup_objects()
assert gc.get_freeze_count() > 0.9 * before > 0
assert len(gc.get_objects()) < 0.1 * before
assert gc.get_threshold()[0] == YOUNG
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_job_lives_from_creation_to_complete_and_its_pods_go_with_it() -> None:
    stage = Stage()
    async with stage.operating():
        job = await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        pods = await stage.pods()
        assert sorted(pods) == ["digits-w0-0", "digits-w1-0", "digits-w2-0"]
        assert {controller_uid(pod.metadata) for pod in pods.values()} == {job.metadata.uid}
        assert (await stage.client.get(LEASES, "default", "everstep-operator")).spec.holder_identity
        for name in pods:
            await stage.end(name, 0)
        await stage.until("the job is complete", stage.complete)
        events = {one.reason for one in (await stage.client.list(EVENTS, "default")).items}
        assert EventReason.JOB_COMPLETED in events
        await stage.client.delete(JOBS, "default", "digits", propagation="Background")

        async def empty() -> bool:
            services = (await stage.client.list(SERVICES, "default")).items
            return not await stage.pods() and not services

        await stage.until("its pods and service are collected", empty)


async def test_job_recovers_from_a_lost_pod_and_completes() -> None:
    stage = Stage()
    async with stage.operating():
        await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        first = set(await stage.pods())
        await stage.client.delete(PODS, "default", "digits-w1-0")

        async def replaced() -> bool:
            running = await stage.run_pods()
            return running and len(await stage.pods()) == 3 and not first & set(await stage.pods())

        await stage.until("a new round runs", replaced)
        for name in await stage.pods():
            await stage.end(name, 0)
        await stage.until("the job is complete", stage.complete)


async def test_job_completes_though_answers_are_lost_and_requests_refused() -> None:
    faults = Faults()
    # Three creates and two status writes lose their answers, and others are refused, for a while.
    for skip in (0, 2, 4):
        faults.add(LoseAnswer(), "create", resource=PODS, skip=skip, times=1)
    faults.add(Refuse(500), "patch", resource=JOBS, times=3)
    faults.add(LoseAnswer(), "patch", resource=JOBS, skip=4, times=2)
    faults.add(Refuse(429, retry_after=1), "create", resource=SERVICES, times=1)
    stage = Stage(faults)
    async with stage.operating():
        await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        assert sorted(await stage.pods()) == ["digits-w0-0", "digits-w1-0", "digits-w2-0"]
        for name in await stage.pods():
            await stage.end(name, 0)
        await stage.until("the job is complete", stage.complete)


async def gone(stage: Stage) -> bool:
    return not (await stage.client.list(PDBS, "default")).items


async def uids(stage: Stage) -> dict[str, str]:
    return {name: pod.metadata.uid for name, pod in (await stage.pods()).items()}


async def test_elastic_job_replaces_one_worker_is_resized_live_and_completes() -> None:
    """Survivors keep their pods through every loss and every resize."""
    stage = Stage()
    async with stage.operating():
        await stage.client.create(JOBS, "default", ELASTIC)
        await stage.until("the job runs", stage.run_pods)
        first = await uids(stage)
        assert sorted(first) == [f"digits-w{i}-0" for i in range(4)]
        await stage.client.delete(PODS, "default", "digits-w1-0", grace_seconds=0)
        await stage.end("digits-w3-0", 137)

        async def replaced() -> bool:
            return await stage.run_pods() and {"digits-w1-1", "digits-w3-1"} < set(await stage.pods())

        await stage.until("both come back", replaced)
        now = await uids(stage)
        assert {n: now[n] for n in ("digits-w0-0", "digits-w2-0")} == {
            n: first[n] for n in ("digits-w0-0", "digits-w2-0")
        }
        assert len(now) == 4

        (budget,) = (await stage.client.list(PDBS, "default")).items
        assert (budget.metadata.name, budget.spec.min_available) == ("digits-workers", 2)
        for size in (6, 2, 3):
            await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"replicas": size}})

            async def resized(size: int = size) -> bool:
                return await stage.run_pods() and len(await stage.pods()) == size

            await stage.until(f"{size} workers run", resized)
        last = await uids(stage)
        assert sorted(last) == ["digits-w0-0", "digits-w1-1", "digits-w2-2"]  # newer than any that was taken out
        assert last["digits-w0-0"] == first["digits-w0-0"]
        status = (await stage.client.get(JOBS, "default", "digits")).status
        assert status["roster"]["wanted"] == status["world"]["size"] == 3
        assert status["restarts"]["userCode"] == 0
        await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"suspend": True}})

        async def unguarded() -> bool:
            return not (await stage.client.list(PDBS, "default")).items and not await stage.pods()

        await stage.until("a suspended job holds up no drain", unguarded)
        change = {"spec": {"elastic": {"minReplicas": 3}, "suspend": False}}
        await stage.client.merge_patch(JOBS, "default", "digits", change)

        async def guarded() -> bool:
            budgets = (await stage.client.list(PDBS, "default")).items
            return await stage.run_pods() and [b.spec.min_available for b in budgets] == [3]

        await stage.until("it runs again, and has its budget", guarded)
        for name in await stage.pods():
            await stage.end(name, 0)
        await stage.until("the job is complete", stage.complete)
        await stage.until("its budget is gone", lambda: gone(stage))


async def test_elastic_job_comes_to_its_size_though_the_operator_restarts_and_answers_are_lost() -> None:
    faults = Faults()
    for skip in (0, 3, 5):
        faults.add(LoseAnswer(), "create", resource=PODS, skip=skip, times=1)
    faults.add(LoseAnswer(), "patch", resource=JOBS, skip=2, times=2)
    stage = Stage(faults)
    for lost in ("digits-w1-0", "digits-w2-0"):
        async with stage.operating():
            if lost == "digits-w1-0":
                await stage.client.create(JOBS, "default", ELASTIC)
            await stage.until("the job runs", stage.run_pods)
            await stage.client.delete(PODS, "default", lost, grace_seconds=0)
    async with stage.operating():

        async def whole() -> bool:
            return await stage.run_pods() and len(await stage.pods()) == 4

        await stage.until("all are back", whole)
        assert sorted(await stage.pods()) == ["digits-w0-0", "digits-w1-1", "digits-w2-1", "digits-w3-0"]


async def test_elastic_job_follows_the_rounds_that_its_agents_write() -> None:
    """The operator's own round store: it raises the round, the planner says what came of it."""
    stage = Stage()
    spec = {**ELASTIC["spec"], "rendezvous": {"backend": "everstep"}}
    async with stage.operating() as operator:
        job = await stage.client.create(JOBS, "default", {**ELASTIC, "spec": spec})

        async def created() -> bool:
            await stage.run_pods()
            return len(await stage.pods()) == 4

        async def says(reason: str, round_: int, size: int) -> None:
            async def said() -> bool:
                await stage.run_pods()
                world = (await stage.client.get(JOBS, "default", "digits")).status["world"]
                found = (await stage.reason(), world["round"], world.get("formedRound"), world["size"])
                return found == (reason, round_, round_, size)

            await stage.until(f"{reason} in round {round_} of {size}", said)

        await stage.until("the pods run", created)
        assert await stage.reason() != "Running", "no round has formed"
        await form(stage, operator, job, {0: 0, 1: 0, 2: 0, 3: 0})
        await says("Running", 1, 4)
        await stage.client.delete(PODS, "default", "digits-w1-0", grace_seconds=0)
        await says("Recovering", 1, 4)
        await form(stage, operator, job, {0: 0, 2: 0, 3: 0})
        await says("RunningDegraded", 2, 3)
        await form(stage, operator, job, {0: 0, 1: 1, 2: 0, 3: 0})
        await says("Running", 3, 4)
    # Another leader reads the document; nothing has happened to the world.
    async with stage.operating() as operator:
        await stage.client.delete(PODS, "default", "digits-w3-0", grace_seconds=0)
        await says("Recovering", 3, 4)
        await form(stage, operator, job, {0: 0, 1: 1, 2: 0, 3: 1})
        await says("Running", 4, 4)
        assert sorted(await stage.pods()) == ["digits-w0-0", "digits-w1-1", "digits-w2-0", "digits-w3-1"]
        for name in await stage.pods():
            await stage.end(name, 0)
        await stage.until("the job is complete", stage.complete)


async def test_agent_that_calls_while_nobody_leads_is_told_so_and_why() -> None:
    faults = Faults()
    stage = Stage(faults)
    async with stage.operating() as operator:
        await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        faults.add(Refuse(500, message="etcd is full"), "replace", resource=LEASES)
        await stage.until("it does not lead", lambda: not operator.elector.is_leader())
        await stage.clock.advance(15)
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{operator.server.port}{REPORT_PATH}"
            calling = asyncio.create_task(session.post(url, data=b"{}"))
            await stage.until("it is answered", calling.done)
            answer = await calling
            reason = (await answer.json())["reason"]
        assert answer.status == 503
        assert re.match(r"no operator has led for \d+ s: the Lease cannot be reached: .*etcd is full", reason), reason
        await stage.clock.advance(10)
        assert (operator.metrics.registry.get_sample_value("everstep_leaderless_seconds") or 0) > 10


@pytest.mark.parametrize("backend", ["c10d", "everstep", "etcd"])
@pytest.mark.parametrize("claimed", [2**60, 2**53 - 1, 7])
async def test_report_of_an_absurd_round_blocks_nothing(backend: str, claimed: int) -> None:
    """It was believed, every plan was refused from then on, and no pod was replaced until the leader changed."""
    stage = Stage()
    etcd = {"etcd": {"endpoints": ["http://etcd:2379"]}} if backend == "etcd" else {}
    spec = {**ELASTIC["spec"], "rendezvous": {"backend": backend, **etcd}}
    if backend == "c10d":
        del spec["elastic"]
    async with stage.operating() as operator:
        job = await stage.client.create(JOBS, "default", {**ELASTIC, "spec": spec})

        async def all_run() -> bool:
            await stage.run_pods()
            return len(await stage.pods()) == 4

        await stage.until("the pods run", all_run)
        if backend == "everstep":
            await form(stage, operator, job, {0: 0, 1: 0, 2: 0, 3: 0})
        await stage.until("the job runs", stage.run_pods)
        body = f'{{"phase":"start","rank":1,"world_size":4,"at":1,"round":{claimed}}}'
        answer = await send(stage, operator, "digits-w1-0", body.encode())
        assert answer == (400 if claimed >= 2**53 else 204 if backend == "etcd" else 403)
        await stage.client.delete(PODS, "default", "digits-w2-0", grace_seconds=0)
        replacement = "digits-w2-1"
        await stage.until("the lost worker is replaced", lambda: replaced(stage, replacement))
        # And the figures of the others are taken.
        status = (await stage.client.get(JOBS, "default", "digits")).status
        round_ = status["world"]["round"] if backend != "etcd" else 0
        pod = "digits-w0-1" if backend == "c10d" else "digits-w0-0"
        if backend == "etcd":
            await stage.clock.advance(60)
        trained = Report(Phase.TRAIN, rank=0, world_size=4, at=1.0, round=round_, step=12)
        assert await send(stage, operator, pod, trained) == 204

        async def told() -> bool:
            status = (await stage.client.get(JOBS, "default", "digits")).status
            return bool(status.get("progress", {}).get("step") == 12)

        await stage.until("the step is in the status", told)


def sizes(root: object) -> dict[str, int]:
    """How much every container holds that can be reached from `root` through objects of the operator, by its path."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(type(root).__name__, root)]
    while waiting:
        path, one = waiting.pop()
        if id(one) in seen or isinstance(one, str | bytes | int | float | type(None)):
            continue
        seen.add(id(one))
        if isinstance(one, dict | set | frozenset | list | tuple | deque):
            found[path] = max(found.get(path, 0), len(one))
            inside = one.values() if isinstance(one, dict) else one
            waiting += [(f"{path}[]", value) for value in inside]
        elif isinstance(one, types.MethodType):
            waiting.append((path, one.__self__))
        elif isinstance(one, types.FunctionType):
            waiting += [(f"{path}()", cell.cell_contents) for cell in one.__closure__ or ()]
        elif type(one).__module__.startswith(("everstep.", "everstep_operator.")):
            names = {
                *getattr(one, "__dict__", ()),
                *(n for c in type(one).__mro__ for n in getattr(c, "__slots__", ())),
            }
            waiting += [(f"{path}.{name}", getattr(one, name, None)) for name in sorted(names)]
    return found


async def test_nothing_grows_with_the_jobs_that_came_and_went() -> None:
    """Every container that the operator holds, whatever its name: what it remembers of a job goes with the job."""
    stage = Stage()
    spec = {**ELASTIC["spec"], "replicas": 2, "rendezvous": {"backend": "everstep"}}

    async def live(operator: Operator, number: int) -> None:
        name = f"job{number}"
        job = await stage.client.create(JOBS, "default", {"metadata": {"name": name}, "spec": spec})

        async def pods_run() -> bool:
            await stage.run_pods()
            mine = [pod for pod in (await stage.pods()).values() if controller_uid(pod.metadata) == job.metadata.uid]
            return len(mine) == 2 and all(pod.status.phase == "Running" for pod in mine)

        await stage.until("its pods run", pods_run)
        await form(stage, operator, job, {0: 0, 1: 0})
        for rank in range(2):
            trained = Report(Phase.TRAIN, rank=rank, world_size=2, at=1.0, round=1, step=1, committed_step=1)
            assert await send(stage, operator, f"{name}-w{rank}-0", trained) == 204
        agent = Agent(JobRef("default", name, job.metadata.uid), Worker("a-pod", 0, 0))
        join_request = JoinRequest(Member(0, "agent-0-0"), 0, Sizes(2, 8)).encode()
        operator.rounds.of(agent.job).announce(agent.worker, "agent-0-0", join_request, 3.0)
        watching = asyncio.create_task(operator.rounds.of(agent.job).watch(agent.worker, 0, 0, 1.0))
        await stage.client.delete(PODS, "default", f"{name}-w1-0", grace_seconds=0)
        await stage.until("it is replaced", lambda: replaced(stage, f"{name}-w1-1"))
        if number % 2:
            await stage.end(f"{name}-w0-0", 1)  # what is delayed or waits for its back-off goes too
            await stage.clock.advance(0.1)
        await stage.client.delete(JOBS, "default", name, propagation="Background")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async with stage.operating() as operator:
        for number in range(4):
            await live(operator, number)
        await stage.clock.advance(120)
        before = sizes(operator)
        assert any("_memory" in path for path in before)
        for number in range(4, 16):
            await live(operator, number)
        await stage.clock.advance(120)
        after = sizes(operator)
    # Answers about tokens and buckets of callers have bounds of their own (test_endpoint_token_reviews,
    # test_endpoint_tenant_limits) and expire, buckets by the machine's clock and not by the stage's.
    kept = {path: size for path, size in after.items() if not re.search(r"\._identities\.|\._calls\.", path)}
    assert not {path: (before.get(path, 0), size) for path, size in kept.items() if size >= before.get(path, 0) + 6}


async def test_every_metric_is_moved_by_what_it_speaks_of() -> None:
    """A metric that nothing moves reads as if nothing had happened."""
    faults = Faults()
    stage = Stage(faults)
    spec = {**ELASTIC["spec"], "rendezvous": {"backend": "everstep"}}
    seen: set[str] = set()

    async with stage.operating() as operator:

        def moved(*names: str) -> bool:
            seen.update(name for name, value in samples(operator.metrics).items() if value > 0)
            return all(any(name.startswith(wanted) for name in seen) for wanted in names)

        job = await stage.client.create(JOBS, "default", {**ELASTIC, "spec": spec})

        async def all_run() -> bool:
            await stage.run_pods()
            return len(await stage.pods()) == 4

        async def train(round_: int, step: int, *pods: str) -> None:
            for rank, pod in enumerate(pods):
                held: dict[str, Any] = {"peak_memory": 2**30, "peak_device_memory": 5}
                report = Report(Phase.TRAIN, rank, len(pods), at=1.0, round=round_, step=step, **held)
                assert await send(stage, operator, pod, report) == 204

        await stage.until("the pods run", all_run)
        await form(stage, operator, job, {0: 0, 1: 0, 2: 0, 3: 0})
        await train(1, 10, *(f"digits-w{i}-0" for i in range(4)))
        await stage.until(
            "it runs", lambda: moved("everstep_jobs Running", "everstep_leader", "everstep_reports_total")
        )
        await stage.client.delete(PODS, "default", "digits-w1-0", grace_seconds=0)
        await stage.until("it is replaced", lambda: replaced(stage, "digits-w1-1"))
        await form(stage, operator, job, {0: 0, 2: 0, 3: 0})
        await train(2, 11, "digits-w0-0", "digits-w2-0", "digits-w3-0")
        recovered = ("everstep_recoveries_total PodDeleted shrink", "everstep_recovery_seconds_count")
        await stage.until("it has recovered", lambda: moved(*recovered))
        await form(stage, operator, job, {0: 0, 1: 1, 2: 0, 3: 0})
        await train(3, 12, "digits-w0-0", "digits-w2-0", "digits-w3-0", "digits-w1-1")
        await stage.until("it has regrown", lambda: moved("everstep_recoveries_total PodDeleted regrow"))

        # What agents ask of the round store.
        ask = partial(call, stage, operator, "digits-w0-0")
        watching = asyncio.create_task(ask("GET", f"{DOCUMENT_PATH}?version=0&lapses=0&wait=1"))
        await stage.until("a watch waits or was answered", lambda: moved("everstep_round_requests_total watch 200"))
        await watching
        assert await ask("GET", DOCUMENT_PATH) == 200
        agent, join_request = f"{PRESENCE_PATH}/agent-0-0", JoinRequest(Member(0, "agent-0-0"), 0, Sizes(2, 8)).encode()
        assert await ask("PUT", agent, data=join_request, headers={TTL_HEADER: "30"}) == 200
        assert await ask("POST", agent) == 204
        assert await ask("GET", PRESENCE_PATH) == 200
        assert await ask("PUT", DOCUMENT_PATH, data=b"{}", headers={VERSION_HEADER: "1"}) in (400, 412)
        assert await ask("DELETE", agent) == 204
        assert moved(*(f"everstep_round_requests_total {name}" for name in ROUND_CALLS))

        # A watch that is lost for good; writes that fail; more work than workers.
        stage.cluster.compact()
        faults.add(Expire(), "event", resource=PODS, times=1)
        await stage.client.delete(PODS, "default", "digits-w3-0", grace_seconds=0)
        await stage.until("pods are listed again", lambda: moved("everstep_informer_relists_total pods"))
        faults.add(Refuse(500), "patch", resource=JOBS, times=3)
        for number in range(40):
            await stage.client.create(JOBS, "default", {**JOB, "metadata": {"name": f"more{number}"}})
        faults.add(Delay(30), "create", resource=PODS)
        await stage.until("keys wait", lambda: moved("everstep_queue_depth", "everstep_reconcile_errors_total"))
    exported = {f.name for f in text_string_to_metric_families(Metrics(process=False).render().decode())}
    ours = {name for name in exported if not re.match(r"everstep_(job|node|jobs_without)_", name)}  # test_job_metrics
    still = {name for name in ours if not any(one.startswith(name) for one in seen)}
    # Requests to the API server are told by the HTTP client (test_kube_transport), waiting agents by the next test, and
    # here somebody always leads (test_agent_that_calls_while_nobody_leads_is_told_so_and_why). TLS: test_tls_chart.
    others = {"everstep_round_watches", "everstep_leaderless_seconds", "everstep_certificate_end_timestamp_seconds"}
    assert still == {"everstep_api_requests", "everstep_api_request_seconds"} | others


async def test_agents_that_wait_are_counted_while_they_wait() -> None:
    stage = Stage()
    spec = {**ELASTIC["spec"], "rendezvous": {"backend": "everstep"}}
    async with stage.operating() as operator:
        job = await stage.client.create(JOBS, "default", {**ELASTIC, "spec": spec})
        await stage.until("a pod is there", lambda: replaced(stage, "digits-w0-0"))
        await form(stage, operator, job, {0: 0, 1: 0})
        sight = await operator.rounds.of(JobRef("default", "digits", job.metadata.uid)).read(0)
        path = f"{DOCUMENT_PATH}?version={sight.version}&lapses={sight.expirations}&wait=600"
        watching = asyncio.create_task(call(stage, operator, "digits-w0-0", "GET", path))
        await stage.until("it waits", lambda: samples(operator.metrics)["everstep_round_watches"] == 1)
        await form(stage, operator, job, {0: 0, 1: 0, 2: 0})
        assert await watching == 200
        assert samples(operator.metrics)["everstep_round_watches"] == 0


async def test_no_pod_waits_for_an_event_to_be_written() -> None:
    faults = Faults()
    stage = Stage(faults)
    async with stage.operating():
        await stage.client.create(JOBS, "default", ELASTIC)
        await stage.until("the job runs", stage.run_pods)
        faults.add(Delay(10_000), "create", resource=EVENTS)
        for life in range(3):
            await stage.client.delete(PODS, "default", f"digits-w1-{life}", grace_seconds=0)
            lost = stage.clock.monotonic()
            name = f"digits-w1-{life + 1}"
            await stage.until("it is replaced", lambda name=name: replaced(stage, name))
            assert stage.clock.monotonic() - lost < 10
            await stage.until("it runs", stage.run_pods)


@pytest.mark.parametrize("backend", ["everstep", "c10d"])
async def test_job_edited_while_no_operator_runs_ends_with_one_program_uncharged(backend: str) -> None:
    """As a queue does: suspended, then changed and resumed in one update, before an operator looks."""
    stage = Stage()
    job = {"metadata": JOB["metadata"], "spec": {**JOB["spec"], "rendezvous": {"backend": backend}}}  # type: ignore[dict-item]
    template = {"spec": {"containers": [{**JOB["spec"]["template"]["spec"]["containers"][0], "image": "train:2"}]}}  # type: ignore[index]

    def images(pods: dict[str, Pod]) -> list[str]:
        return [one.metadata.labels["everstep.dev/spec-hash"] for one in pods.values()]

    async with stage.operating():
        await stage.client.create(JOBS, "default", job)

        async def all_run() -> bool:
            await stage.run_pods()
            return len(await stage.pods()) == 3 and all(
                p.status.phase == "Running" for p in (await stage.pods()).values()
            )

        await stage.until("all run", all_run)
    first = await stage.pods()
    await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"suspend": True}})
    await stage.client.merge_patch(JOBS, "default", "digits", {"spec": {"suspend": False, "template": template}})
    async with stage.operating():

        async def replaced() -> bool:
            now = await stage.pods()
            return await all_run() and not {p.metadata.uid for p in first.values()} & {
                p.metadata.uid for p in now.values()
            }

        await stage.until("all are new", replaced)
    assert len(set(images(await stage.pods()))) == 1
    assert set(images(await stage.pods())) != set(images(first))
    assert (await stage.client.get(JOBS, "default", "digits")).status["restarts"]["total"] == 0
    events = (await stage.client.list(EVENTS, "default")).items
    assert [e.reason for e in events].count("WorkersUpdated") == 1


async def test_finished_job_whose_spec_a_newer_version_refuses_stays_finished() -> None:
    stage = Stage()
    async with stage.operating():
        await stage.client.create(JOBS, "default", JOB)
        await stage.until("the job runs", stage.run_pods)
        for name in await stage.pods():
            await stage.end(name, 0)
        await stage.until("the job is complete", stage.complete)
    before = (await stage.client.get(JOBS, "default", "digits")).status
    settings = OperatorSettings.from_env(
        {"EVERSTEP_PORT": "0", "EVERSTEP_POD_NAME": "replica-1", "EVERSTEP_CHECKPOINT_URL_PREFIXES": "s3://ours/"}
    )
    change = {"spec": {"suspend": True, "checkpoint": {"url": "s3://others/x"}}}
    await stage.client.merge_patch(JOBS, "default", "digits", change)
    async with stage.operating(settings):
        await stage.until("it leads", stage.operator.elector.is_leader)  # type: ignore[union-attr]
        await stage.clock.advance(60)
    after = (await stage.client.get(JOBS, "default", "digits")).status
    assert after["conditions"] == before["conditions"]


async def test_pods_whose_common_labels_another_tool_rewrites_stay_workers() -> None:
    """Helm, Argo CD and others write app.kubernetes.io/managed-by on what they see."""
    stage = Stage()
    async with stage.operating():
        await stage.client.create(JOBS, "default", ELASTIC)
        await stage.until("the job runs", stage.run_pods)
        first = await uids(stage)
        labels = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/name": "other"}}}
        for name in first:
            await stage.client.merge_patch(PODS, "default", name, labels)
        for resource in (SERVICES, PDBS):
            await stage.client.merge_patch(resource, "default", "digits-workers", labels)
        await stage.clock.advance(60)
        assert await uids(stage) == first
        await stage.end("digits-w3-0", 137)

        async def replaced() -> bool:
            return await stage.run_pods() and "digits-w3-1" in await stage.pods()

        await stage.until("a lost one is still seen", replaced)
    assert (await stage.client.get(JOBS, "default", "digits")).status["restarts"]["total"] == 1


OWN_ROUNDS = {
    "metadata": {"name": "digits"},
    "spec": {**ELASTIC["spec"], "rendezvous": {"backend": "everstep"}},  # type: ignore[dict-item]
}
ORPHANS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "pod": (
        PODS, JOB, {"metadata": {"name": "digits-w0-0"}, "spec": {"containers": [{"name": "worker", "image": "x"}]}},
    ),
    "service": (SERVICES, JOB, {"metadata": {"name": "digits-workers"}, "spec": {"clusterIP": "None"}}),
    "config map": (CONFIGMAPS, OWN_ROUNDS, {"metadata": {"name": "digits-rounds"}, "data": {"document": "{}"}}),
    "disruption budget": (PDBS, ELASTIC, {"metadata": {"name": "digits-workers"}, "spec": {"minAvailable": 1}}),
}  # fmt: skip


@pytest.mark.parametrize("case", ORPHANS)
async def test_object_that_an_earlier_job_left_is_named_with_its_kind_and_the_remedy(case: str) -> None:
    resource, job, orphan = ORPHANS[case]
    stage = Stage()
    await stage.client.create(resource, "default", orphan)
    name = orphan["metadata"]["name"]
    async with stage.operating():
        await stage.client.create(JOBS, "default", job)

        async def is_named() -> bool:
            await stage.run_pods()
            conditions = (await stage.client.get(JOBS, "default", "digits")).status.get("conditions", ())
            told = [c["message"] for c in conditions if c["type"] == "NeedsAttention" and c["status"] == "True"]
            notes = [e.note for e in (await stage.client.list(EVENTS, "default")).items if e.reason == "NameTaken"]
            remedy = f"kubectl delete {resource.kind.lower()} {name} -n default"
            return all(
                any(f"{resource.kind} {name} has a name" in text and remedy in text for text in texts)
                for texts in (told, notes)
            )

        await stage.until("status and event name it", is_named)
        await stage.client.delete(resource, "default", name, grace_seconds=0)

        async def begun() -> bool:
            await stage.run_pods()
            conditions = (await stage.client.get(JOBS, "default", "digits")).status.get("conditions", ())
            waits = any(c["type"] == "NeedsAttention" and c["status"] == "True" for c in conditions)
            return not waits and len(await stage.pods()) == job["spec"]["replicas"]

        await stage.until("the job goes on once it is deleted", begun)
