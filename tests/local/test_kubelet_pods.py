"""What becomes of a pod: phases, exits, deletion. Each pod is a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep_local.kubelet.sources import NotStartable
from everstep_local.kubelet.starter import Starter
from everstep_operator.kube.wire import ObjectMeta, Unstructured
from support.local import kubelet_world

Start = Callable[..., Any]
NS = "default"
# Two generations in sessions of their own, that ignore SIGTERM: what a launcher leaves when it is killed.
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
for generation in range(2):
    if os.fork() == 0:
        os.setsid()
        print("pid", os.getpid(), flush=True)
    else:
        break
time.sleep(600)
"""


async def family(m: Any, name: str) -> list[int]:
    """The pids of a running FAMILY."""

    async def all_there() -> list[int] | None:
        try:
            pids = [int(line.split()[1]) for line in await m.log(name)]
        except KeyError:
            return None
        return pids if len(pids) == 3 else None

    found: list[int] = await m.until("three processes", all_there)
    return found


async def test_succeeding_pod_is_reported_with_its_times_and_its_address(machine: Start) -> None:
    m = await machine()
    await m.create("ok", "sh", "-c", "echo out; echo err >&2")
    ended = await m.until_over("ok")
    pod = await m.pod("ok")
    assert (ended["exitCode"], ended["reason"], "message" in ended) == (0, "Completed", False)
    assert ended["startedAt"] <= ended["finishedAt"]
    assert pod.status["phase"] == "Succeeded"
    assert pod.status["podIP"].startswith("127.")
    assert sorted([(x.stream, x.text) async for x in m.nodes.logs(NS, "ok")]) == [("stderr", "err"), ("stdout", "out")]


async def test_running_pod_is_ready_and_names_its_process(machine: Start) -> None:
    m = await machine()
    await m.create("busy", "sleep", "600")
    pod = await m.until_phase("busy", "Running")
    conditions = {c["type"]: c["status"] for c in pod.status["conditions"]}
    assert {conditions[t] for t in ("PodScheduled", "Initialized", "ContainersReady", "Ready")} == {"True"}
    assert "startedAt" in (await m.state("busy"))["running"]
    assert kubelet_world.alive(m.nodes.pids(NS, "busy")["worker"])


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$$$", 137), ("kill -15 $$$$", 143)])
async def test_failing_pod_is_reported_with_its_exit_code(machine: Start, script: str, code: int) -> None:
    m = await machine()
    await m.create("bad", "sh", "-c", script)
    ended = await m.until_over("bad")
    assert (ended["exitCode"], ended["reason"]) == (code, "Error")
    assert (await m.pod("bad")).status["phase"] == "Failed"


async def test_missing_program_is_a_start_error(machine: Start) -> None:
    m = await machine()
    await m.create("bad", "no-such-program")
    ended = await m.until_over("bad")
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert 'exec: "no-such-program": executable file not found in $PATH' in ended["message"]


async def test_termination_message_is_what_the_program_wrote(machine: Start) -> None:
    m = await machine()
    await m.create("said", "sh", "-c", 'echo noise; printf last > "$EVERSTEP_TERMINATION_LOG"; exit 1')
    assert (await m.until_over("said"))["message"] == "last"


async def test_termination_message_falls_back_to_the_end_of_the_log(machine: Start) -> None:
    m = await machine()
    script = "i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done; exit 1"
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    await m.create("fails", "sh", "-c", script, **policy)
    lines = (await m.until_over("fails"))["message"].splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("line 120", "line 199", 80)
    await m.create("silent", "sh", "-c", "echo all is well", **policy)
    assert "message" not in await m.until_over("silent")


async def test_deleted_pod_gets_sigterm_and_then_goes(machine: Start) -> None:
    m = await machine()
    await m.create("polite", "sh", "-c", 'trap "echo bye; exit 0" TERM; echo up; while :; do sleep 0.05; done')
    await m.until_logged("polite", "up")
    path = next(m.nodes.folder.rglob("log"))
    await m.delete("polite", grace=20)
    await m.until_gone("polite")

    async def removed() -> bool:
        return not path.exists()

    await m.until("its files are gone too", removed)


async def test_deletion_leaves_none_of_the_processes_that_ignore_it(machine: Start) -> None:
    m = await machine()
    await m.create("stubborn", sys.executable, "-c", FAMILY)
    pids = await family(m, "stubborn")
    await m.delete("stubborn", grace=1)
    await m.until_gone("stubborn")
    assert [pid for pid in pids if kubelet_world.alive(pid)] == []


async def test_forced_deletion_kills_at_once(machine: Start) -> None:
    m = await machine()
    await m.create("forced", sys.executable, "-c", FAMILY)
    pids = await family(m, "forced")
    await m.delete("forced", grace=0)

    async def dead() -> bool:
        return not any(kubelet_world.alive(pid) for pid in pids)

    await m.until("all are dead", dead)
    assert await m.pod("forced") is None


@pytest.mark.long
async def test_node_switched_off_while_a_pod_ends_leaves_nothing_of_it(tmp_path: Path) -> None:
    before = kubelet_world.remains(tmp_path)
    for turns in range(30):  # of the event loop, between the end of the processes and the node's
        async with kubelet_world.started(tmp_path) as m:
            await m.create("ending", "sleep", "600")
            await m.until_phase("ending", "Running")
            await m.delete("ending", grace=10)
            while m.nodes.pids(NS, "ending"):  # noqa: ASYNC110  # turns of the loop are what is counted
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
    assert kubelet_world.remains(tmp_path) - before == set()


async def test_second_deletion_shortens_the_grace(machine: Start) -> None:
    m = await machine()
    await m.create("slow", sys.executable, "-c", FAMILY)
    await family(m, "slow")
    await m.delete("slow", grace=600)
    await m.delete("slow", grace=1)
    await m.until_gone("slow")


async def test_end_of_the_main_process_is_the_end_of_all(machine: Start) -> None:
    m = await machine()
    await m.create("launcher", sys.executable, "-c", FAMILY)
    pids = await family(m, "launcher")
    os.kill(m.nodes.pids(NS, "launcher")["worker"], signal.SIGKILL)
    assert (await m.until_over("launcher"))["exitCode"] == 137
    assert [pid for pid in pids if kubelet_world.alive(pid)] == []


async def test_killed_guard_takes_its_pod_along(machine: Start) -> None:
    m = await machine()
    await m.create("unguarded", sys.executable, "-c", FAMILY)
    pids = await family(m, "unguarded")
    # Servers of other tests may be children of this process too.
    (guard,) = (
        p for p in kubelet_world.children_of(os.getpid()) if "processes/guard.py" in kubelet_world.command_of(p)
    )
    os.kill(guard, signal.SIGKILL)
    assert (await m.until_over("unguarded"))["exitCode"] == 137

    async def dead() -> bool:
        return not any(kubelet_world.alive(pid) for pid in pids)

    await m.until("all are dead", dead)


async def test_processes_of_two_runs_are_told_apart_though_their_pods_have_the_same_uid(
    machine: Start, tmp_path: Path
) -> None:
    """In-memory clusters that were seeded alike give the same UIDs; a run must never kill what is another's."""
    m = await machine()
    worker = {"name": "worker", "command": ["true"]}
    spec = {"restartPolicy": "Never", "containers": [worker]}
    pod = Unstructured(metadata=ObjectMeta(name="a", namespace=NS, uid="same"), spec=spec)
    marks = [
        (await Starter(m.nodes._host, tmp_path / run).prepare(pod, [worker]))["worker"].mark for run in ("one", "two")
    ]
    m.nodes.addresses.release("same")
    assert marks[0] != marks[1]


async def test_deadline_fails_the_pod(machine: Start) -> None:
    m = await machine()
    await m.create("late", "sleep", "600", spec={"activeDeadlineSeconds": 1})
    ended = await m.until_over("late")
    assert ended["exitCode"] == 137
    assert (await m.pod("late")).status["reason"] == "DeadlineExceeded"


async def test_deadline_fails_a_pod_that_could_not_start(machine: Start) -> None:
    m = await machine()
    await m.create("late", "true", spec={"activeDeadlineSeconds": 1}, envFrom=[{"secretRef": {"name": "none"}}])
    pod = await m.until_phase("late", "Failed")
    assert pod.status["reason"] == "DeadlineExceeded"
    assert "waiting" in await m.state("late")


async def test_init_containers_run_one_by_one_before_the_others(machine: Start) -> None:
    m = await machine()
    volume = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    inits = [
        {"name": f"init{i}", "image": "none", "command": ["sh", "-c", f"echo {i} >> /shared/order"], **volume}
        for i in range(2)
    ]
    spec = {"initContainers": inits, "volumes": [{"name": "shared", "emptyDir": {}}]}
    await m.create("staged", "sh", "-c", "cat /shared/order", spec=spec, **volume)
    await m.until_phase("staged", "Succeeded")
    assert await m.log("staged", "worker") == ["0", "1"]


async def test_failing_init_container_fails_the_pod_before_it_trains(machine: Start) -> None:
    m = await machine()
    inits = [{"name": "init", "image": "none", "command": ["sh", "-c", "exit 4"]}]
    await m.create("staged", "sh", "-c", "echo never", spec={"initContainers": inits})
    pod = await m.until_phase("staged", "Failed")
    assert pod.status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
    assert await m.log("staged", "worker") == []


async def test_restart_policies_other_than_never_are_refused_with_their_name(machine: Start) -> None:
    m = await machine()
    await m.create("always", "true", spec={"restartPolicy": "Always"})
    waiting = await m.until_waiting("always", "spec.restartPolicy Always is not supported in local mode; use Never")
    assert waiting["reason"] == "CreateContainerConfigError"
    await m.delete("always")
    await m.until_gone("always")


async def test_log_is_followed_to_its_end_and_tailed(machine: Start) -> None:
    m = await machine()
    await m.create("talks", "sh", "-c", "for i in 1 2 3 4 5; do echo $i; sleep 0.1; done; printf end")
    await m.until_logged("talks", "1")
    followed = [line.text async for line in m.nodes.logs(NS, "talks", follow_=True)]
    assert followed == ["1", "2", "3", "4", "5", "end"]
    assert [line.text async for line in m.nodes.logs(NS, "talks", tail=2)] == ["5", "end"]


async def test_log_is_bounded_and_keeps_its_end(machine: Start) -> None:
    m = await machine(log_bytes=200_000)
    await m.create("floods", sys.executable, "-c", "for i in range(20000): print(i, 'x' * 50)")
    await m.until_over("floods")
    sizes = sum(p.stat().st_size for p in m.nodes.folder.rglob("log*"))
    lines = [int(line.split()[0]) for line in await m.log("floods")]
    assert sizes < 200_000 + 100_000
    assert lines == list(range(lines[0], 20000))


async def test_processes_of_a_pod_are_all_found(machine: Start) -> None:
    m = await machine()
    await m.create("launcher", sys.executable, "-c", FAMILY)
    pids = await family(m, "launcher")
    assert sorted(m.nodes.processes(NS, "launcher")) == sorted(pids)
    with pytest.raises(KeyError, match="does not run on this machine"):
        m.nodes.processes(NS, "nobody")
    with pytest.raises(KeyError, match="'side' is not in the pod, which has worker"):
        await m.log("launcher", "side")


async def test_field_of_a_wrong_type_is_told(machine: Start) -> None:
    m = await machine()
    worker = {"name": "worker", "command": ["true"], "env": "text"}
    spec = {"restartPolicy": "Never", "containers": [worker]}
    pod = Unstructured(metadata=ObjectMeta(name="odd", namespace=NS, uid="odd"), spec=spec)
    with pytest.raises(NotStartable, match="a field has a wrong type"):
        await Starter(m.nodes._host, m.nodes.folder / "odd").prepare(pod, [worker])
    m.nodes.addresses.release("odd")


async def test_last_word_of_the_worker_library_reaches_the_status(machine: Start) -> None:
    m = await machine()
    script = "from everstep.contract import termination; termination.install(); raise ValueError('no data')"
    job = [{"name": "EVERSTEP_JOB_UID", "value": "uid"}]
    await m.create("dies", "python", "-c", script, env=job, terminationMessagePolicy="FallbackToLogsOnError")
    record = json.loads((await m.until_over("dies"))["message"])
    assert (record["exit_code"], record["error"]) == (1, "ValueError: no data")
