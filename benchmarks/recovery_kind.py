"""How long a job on a real cluster stands still after each fault, and what a stock set-up of Kubernetes does.

    python benchmarks/recovery_kind.py [--quick] [--json PATH] [--samples N] [--only FAULT …] [--backend BACKEND …]

One job a fault: it is hit again and again while it trains. From the moment of the fault to the next optimizer step of
every rank: `detect` (to the operator's notice, from the event it writes), `rendezvous` (to the restore of the slowest
rank: deletes, pod starts, imports of torch), `restore`, `first step`. The peer is an Indexed Job with stock torchrun
(c10d, its defaults, restarts in place), the same script, image and cluster, hit by the same pod delete; what it does
not recover from within its limit counts as that limit.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
import itertools

from figures import Better, Figure, finish, parser, spread

from support.e2e.driver import SYSTEM, Job
from support.e2e.install import install
from support.scenarios.lines import Asked
from support.scenarios.player import wait_for
from support.scenarios.reference import ScenarioError
from testcluster import handle
from testcluster.handle import Cluster
from testcluster.proc import ClusterError

SAMPLES = 10
STEPS = 1_000_000
PEER_LIMIT = 150.0  # seconds; as long as a person would look on
BACKENDS = ("everstep", "c10d")
SETTLED = 40  # steps of the full world before the next fault
# When a container's first process started, in seconds since the epoch; Kubernetes itself tells whole seconds only.
STARTED_AT = """
import os, time
ticks = int(open("/proc/1/stat").read().rsplit(")", 1)[1].split()[19])
up = float(open("/proc/uptime").read().split()[0])
print(time.time() - up + ticks / os.sysconf("SC_CLK_TCK"))
"""
STEP_LINE = re.compile(r"^(\S+) step=(\d+) ", re.MULTILINE)
START_LINE = re.compile(r"^(\S+) start step=(\d+) ", re.MULTILINE)


@contextmanager
def running(cluster: Cluster, backend: str) -> Iterator[Job]:
    """A job that trains until it is taken away."""
    job = Job(cluster, f"bench-{secrets.token_hex(3)}")
    job.prepare()
    try:
        job.apply(workers=2, steps=STEPS, pause=0.05, every=20, backend=backend)
        job.until_step(20, "checkpoint.lastCommittedStep")
        yield job
    finally:
        job.remove()


def noticed_at(job: Job) -> float:
    """When the operator wrote that a worker was lost, in seconds since the epoch; same machine, same clock."""

    def newest() -> float | None:
        items = json.loads(job.kubectl("get", "events.events.k8s.io", "-o", "json"))["items"]
        times = [datetime.fromisoformat(e["eventTime"]).timestamp() for e in items if e["reason"] == "WorkerLost"]
        recent = [t for t in times if t >= job.injected_at]
        return max(recent) if recent else None

    found = wait_for("the WorkerLost event", newest, 20)
    assert found is not None
    return found


def sample(job: Job, name: str, backend: str) -> dict[str, float]:
    """One fault, in seconds by part."""
    FAULTS[name](job)
    if name == "kill-process" and backend == "everstep":
        return in_place(job)
    record = job.until_recovered()
    parts = {
        "detect": max(0.0, noticed_at(job) - job.injected_at),
        "rendezvous": record["rendezvousMs"] / 1000,
        "restore": record["restoreMs"] / 1000,
        "first_step": record["firstStepMs"] / 1000,
    }
    parts["total"] = sum(parts.values())
    parts["lost_steps"] = record.get("lostSteps", 0)
    return parts


def in_place(job: Job) -> dict[str, float]:
    """The agent replaces a killed process itself, so the operator has no record of it: until the first step that is
    printed (each tenth is) after the new process has said that it starts."""
    fault = job.injected_at

    def first_step() -> float | None:
        starts = [t for t, _ in steps_seen(job, START_LINE, since(fault)) if t > fault]
        return next((t for t, _ in steps_seen(job, which=since(fault)) if t > starts[0]), None) if starts else None

    found = wait_for("a step behind the new process's start", first_step, PEER_LIMIT, poll=1)
    assert found is not None
    return {"total": found - fault}


def settle(job: Job) -> None:
    """Nodes are back, and at least one commit was made since the last fault."""
    job.start_nodes()
    committed = job.status()["checkpoint"].get("lastCommittedStep", 0)
    job.until_step(committed + 20, "checkpoint.lastCommittedStep")


def operator_dies_too(job: Job) -> None:
    job.delete_pod(1)
    job.until_lost()
    job.kill_operator()


FAULTS: dict[str, Callable[[Job], object]] = {
    "delete-worker-1": lambda job: job.delete_pod(1),
    "delete-worker-0": lambda job: job.delete_pod(0),
    "kill-process": lambda job: job.kill_process(1),
    "kill-torchrun": lambda job: job.kill_torchrun(0),
    "operator-killed-during-recovery": operator_dies_too,
    "kill-node": lambda job: job.kill_node_of(1),
}

ELASTIC = {"elastic-delete-worker-1": 1, "elastic-delete-worker-0": 0}
NODE_FAULTS = {"elastic-silent-node": Job.kill_node, "elastic-frozen-node": Job.pause_node}


def measure(cluster: Cluster, name: str, samples: int, backend: str) -> list[Figure]:
    """`samples` faults of one kind against one job under `backend`."""
    taken: list[dict[str, float]] = []
    with running(cluster, backend) as job:
        for number in range(samples):
            taken.append(sample(job, name, backend))
            print(f"{backend} {name} {number + 1}/{samples}: {json.dumps(taken[-1])}", file=sys.stderr, flush=True)
            settle(job)
    figures = spread(f"{backend}.{name}.total", [t["total"] for t in taken], "s")
    for part in [p for p in taken[0] if p != "total"]:
        middle = sorted(t[part] for t in taken)[len(taken) // 2]
        unit = "steps" if part == "lost_steps" else "s"
        figures.append(Figure(f"{backend}.{name}.{part}.p50", middle, unit, Better.LOWER, len(taken)))
    return figures


def elastic(cluster: Cluster, index: int, samples: int) -> list[Figure]:
    """Forced deletes of one index's pod; rank 0 prints each step with the size of the world that made it."""
    job = Job(cluster, f"bench-{secrets.token_hex(3)}")
    job.prepare()
    taken: dict[str, list[float]] = {"survivors": [], "full": [], "full_after_start": []}
    try:
        job.submit(job.elastic(STEPS, 0.05, "--print-every", "1"))
        for number in range(samples + 1):
            until_three_train(job, job.injected_at)
            if number == samples:
                break
            for name, value in elastic_sample(job, index).items():
                taken[name].append(value)
            last = {name: round(values[-1], 2) for name, values in taken.items()}
            print(f"elastic delete-worker-{index} {number + 1}/{samples}: {last}", file=sys.stderr, flush=True)
    finally:
        job.remove()
    goals = {"survivors": 1.5, "full_after_start": 6.0}
    return [
        figure
        for name, values in taken.items()
        for figure in spread(f"elastic.delete-worker-{index}.{name}", values, "s", goal_p95=goals.get(name))
    ]


def delete_at_once(job: Job, pod: str) -> None:
    job.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")


def elastic_sample(job: Job, index: int) -> dict[str, float]:
    """One forced delete: seconds by figure."""
    before = job.newest_pods()[index]["metadata"]["name"]
    job.inject(lambda: delete_at_once(job, before))
    fault = job.injected_at
    # The times are the log's own. To look often would only take processor time from the pod that starts.
    survivors = wait_for("two train", lambda: steps_of_world(job, 2, fault), PEER_LIMIT, poll=2)[0]
    full = wait_for("three train again", lambda: steps_of_world(job, 3, survivors), PEER_LIMIT, poll=2)[0]
    new = job.newest_pods()[index]["metadata"]["name"]
    started = float(job.kubectl("exec", new, "-c", "worker", "--", "python3", "-c", STARTED_AT))
    return {"survivors": survivors - fault, "full": full - fault, "full_after_start": full - started}


def lost_node(cluster: Cluster, name: str, samples: int) -> list[Figure]:
    """The node that holds one of three workers and the operator's leader is lost, and nobody is told. `silent`: it dies
    like a machine without power. `frozen`: its kernel accepts and acknowledges, and none of its processes runs. How
    long the other two take no step, by their own logs."""
    job = Job(cluster, f"bench-{secrets.token_hex(3)}")
    job.prepare()
    taken = []
    try:
        job.submit(job.elastic(STEPS, 0.05, "--print-every", "1"))
        for number in range(samples):
            taken.append(lost_node_sample(job, NODE_FAULTS[name]))
            print(f"{name} {number + 1}/{samples}: {taken[-1]:.2f} s", file=sys.stderr, flush=True)
    finally:
        job.remove()
    return spread(f"{name}.survivors", taken, "s", goal_p95=4.0)


def lost_node_sample(job: Job, lose: Callable[[Job, str], None]) -> float:
    for _ in range(5):
        until_three_train(job, job.injected_at)
        node = node_of_one(job)
        lead_from(job, node)
        until_three_train(job, time.time())
        if nodes_of(three_pods(job)).count(node) == 1:  # a worker of a node that came back may have moved meanwhile
            break
    before = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in job.newest_pods().values()}
    print(f"{node} is lost, workers: {before}", file=sys.stderr)
    lose(job, node)
    fault = job.injected_at
    survivors = wait_for("two train", lambda: steps_of_world(job, 2, fault), PEER_LIMIT, poll=2)[0]
    job.start_nodes()
    wait_for("both replicas of the operator are ready", lambda: ready_operators(job.cluster) == 2, 120, poll=1)
    return survivors - fault


def until_three_train(job: Job, after: float) -> None:
    wait_for("three train", lambda: len(steps_of_world(job, 3, after)) > SETTLED, 180, poll=1)


def node_of_one(job: Job) -> str:
    """The node with a single worker; where all are on one node, the last one moves first."""
    pods = wait_for("three pods", lambda: three_pods(job), 120, poll=1)
    nodes = nodes_of(pods)
    alone = [node for node in nodes if nodes.count(node) == 1]
    if alone:
        return alone[0]
    last = max(pods)
    job.cluster.kubectl("cordon", nodes[0])
    try:
        job.delete_pod(last)
        until_three_train(job, job.injected_at)
    finally:
        job.cluster.kubectl("uncordon", nodes[0])
    return job.node_of(max(wait_for("three pods", lambda: three_pods(job), 120, poll=1)))


def nodes_of(pods: Mapping[int, dict[str, Any]]) -> list[str]:
    return [str(pod["spec"]["nodeName"]) for pod in pods.values()]


def three_pods(job: Job) -> dict[int, dict[str, Any]]:
    """By index. None while there are others: of a worker on a node that came back, for a while."""
    pods = job.newest_pods()
    return pods if len(pods) == len(job.pods()) == 3 else {}


def lead_from(job: Job, node: str) -> None:
    """The operator's leader is the replica on `node`: the other replica is deleted as long as it leads."""

    def leads() -> bool:
        where = job.cluster.kubectl("-n", SYSTEM, "get", "pod", job.leader(), "-o", "jsonpath={.spec.nodeName}")
        if str(where.stdout).strip() == node:
            return True
        if where.returncode == 0:
            job.kill_operator()
        return False

    wait_for(f"the operator leads from {node}", leads, 180, poll=8)
    wait_for("both replicas of the operator are ready", lambda: ready_operators(job.cluster) == 2, 120, poll=1)


def ready_operators(cluster: Cluster) -> int:
    selector = ("-l", "app.kubernetes.io/name=everstep")
    done = cluster.kubectl("-n", SYSTEM, "get", "deploy", *selector, "-o", "jsonpath={.items[0].status.readyReplicas}")
    return int(str(done.stdout).strip() or 0)


def since(moment: float) -> str:
    """The flag of `kubectl logs` for what was written after `moment`, in seconds since the epoch."""
    return f"--since-time={datetime.fromtimestamp(moment, UTC).isoformat().replace('+00:00', 'Z')}"


def steps_of_world(job: Job, size: int, after: float) -> list[float]:
    """When steps of a world of `size` were printed after `after`, in seconds since the epoch, sorted."""
    line = re.compile(rf"^(\S+) .*step=(\d+) .*world={size} ", re.MULTILINE)
    return [t for t, _ in steps_seen(job, line, since(after)) if t > after]


def store_restart(cluster: Cluster, samples: int, backend: str) -> list[Figure]:
    """The store's death must not stop training: the longest time without a new step, from the rank's own log."""
    gaps = []
    with running(cluster, backend) as job:
        for _ in range(samples):
            began = time.time()
            job.restart_store()
            wait_for("the store is back", lambda: store_ready(cluster), 60)
            settle(job)
            times = [t for t, _ in steps_seen(job) if t >= began - 2]
            gaps.append(max(b - a for a, b in itertools.pairwise(times)))
            print(f"{backend} store-restarted: longest time for 10 steps {gaps[-1]:.2f} s", file=sys.stderr, flush=True)
    return spread(f"{backend}.store-restarted.longest_10_steps", gaps, "s")


def store_ready(cluster: Cluster) -> bool:
    done = cluster.kubectl("-n", "s3", "get", "deploy", "s3", "-o", "jsonpath={.status.readyReplicas}")
    return str(done.stdout).strip() == "1"


def steps_seen(job: Job, line: re.Pattern[str] = STEP_LINE, which: str = "--tail=2000") -> list[tuple[float, int]]:
    """(time, step) of every such line of every pod, in order of time; `which` lines of a log are read."""
    found = []
    for pod in job.pods():
        log = job.kubectl("logs", pod["metadata"]["name"], "-c", "worker", "--timestamps", which, check=False)
        found += [(datetime.fromisoformat(t[:26] + "+00:00").timestamp(), int(s)) for t, s in line.findall(log)]
    return sorted(found)


def peer_manifest(job: Job) -> dict[str, object]:
    """An Indexed Job that runs stock torchrun with its defaults; pods come back under the same host name."""
    template = job.manifest(Asked(2, STEPS, 0.05, 20, "c10d"))["spec"]["template"]
    worker = template["spec"]["containers"][0]
    rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--max-restarts=100"]
    rendezvous += [f"--rdzv-id={job.namespace}", "--rdzv-endpoint=peer-0.peer:29400"]
    worker["command"] = ["torchrun", *rendezvous, *worker["command"][1:]]
    worker["env"] = [
        {"name": "EVERSTEP_CHECKPOINT_URL", "value": f"{job.url}-peer"},
        {"name": "EVERSTEP_CHECKPOINT_EVERY_STEPS", "value": "20"},
    ]
    worker["envFrom"] = [{"secretRef": {"name": "s3-credentials"}}]
    template["metadata"] = {"labels": {"everstep.dev/job": job.name, "peer": "yes"}}
    template["spec"] |= {"restartPolicy": "Never", "subdomain": "peer", "terminationGracePeriodSeconds": 1}
    spec = {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 1000, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "peer"}, "spec": spec}


def peer(cluster: Cluster, samples: int) -> list[Figure]:
    """The same pod delete against the stock set-up; a fresh job each time, as it may never come back."""
    figures = []
    for index in (1, 0):
        taken = []
        for _ in range(samples):
            taken.append(peer_sample(cluster, index))
            print(f"peer delete-worker-{index}: {taken[-1]:.1f} s", file=sys.stderr, flush=True)
        figures += spread(f"peer-stock-torchrun.delete-worker-{index}.total", taken, "s")
    return figures


def peer_sample(cluster: Cluster, index: int) -> float:
    job = Job(cluster, f"bench-{secrets.token_hex(3)}")
    job.prepare()
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "peer"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"peer": "yes"}},
    }
    try:
        for manifest in (service, peer_manifest(job)):
            job.kubectl("apply", "-f", "-", input=json.dumps(manifest))
        wait_for("the peer trains", lambda: any(step >= 60 for _, step in steps_seen(job)), 120, poll=1)
        (pod,) = job.pods(f"batch.kubernetes.io/job-completion-index={index}")
        began = time.time()
        job.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")
        # Steps that a survivor still prints while the pod is dying are not a recovery.
        quiet = began + 3
        wait_for("the peer goes on", lambda: any(t > quiet for t, _ in steps_seen(job)), PEER_LIMIT, poll=1)
        return min(t for t, _ in steps_seen(job) if t > quiet) - began
    except ScenarioError:
        return PEER_LIMIT
    finally:
        job.remove()


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--samples", type=int, default=SAMPLES, help="faults of each kind")
    p.add_argument(
        "--only", nargs="*", choices=[*FAULTS, *ELASTIC, *NODE_FAULTS, "store-restarted", "peer"], help="these alone"
    )
    p.add_argument("--backend", nargs="*", choices=BACKENDS, help="of jobs of two fixed workers; all, unless --quick")
    args = p.parse_args()
    samples = 1 if args.quick else args.samples
    chosen = args.only or (
        ["delete-worker-1"] if args.quick else [*FAULTS, *ELASTIC, *NODE_FAULTS, "store-restarted", "peer"]
    )
    backends = args.backend or (BACKENDS[:1] if args.quick else BACKENDS)
    cluster = handle.obtain()
    install(cluster)
    figures: list[Figure] = []
    failed = 0
    for name in chosen:
        for cell in cells(cluster, name, samples, backends):
            try:
                figures += cell()
            except (ScenarioError, ClusterError, subprocess.TimeoutExpired) as e:  # the other figures count without it
                failed += 1
                print(f"{name}: NOT MEASURED: {e}", file=sys.stderr, flush=True)
    return finish(figures, args) or int(failed > 0)


def cells(cluster: Cluster, name: str, samples: int, backends: Sequence[str]) -> Iterator[Callable[[], list[Figure]]]:
    """What measures the fault of this name, for each backend that it is measured under."""
    if name == "peer":
        yield lambda: peer(cluster, max(1, samples // 3))
    elif name in ELASTIC:
        yield lambda: elastic(cluster, ELASTIC[name], samples)
    elif name in NODE_FAULTS:
        yield lambda: lost_node(cluster, name, samples)
    else:
        for backend in backends:
            if name == "store-restarted":
                yield partial(store_restart, cluster, samples, backend)
            else:
                yield partial(measure, cluster, name, samples, backend)


if __name__ == "__main__":
    sys.exit(main())
