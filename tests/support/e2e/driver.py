"""Jobs on a cluster with nodes. Everything is done as a user would do it: kubectl, kill, docker kill."""

from __future__ import annotations

import base64
import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from support import TESTS
from support.scenarios import training_processes
from support.scenarios.lines import Asked
from support.scenarios.player import BUSY, SECONDS, Player, wait_for
from support.scenarios.reference import EXAMPLE, ScenarioError
from testcluster.handle import Cluster
from testcluster.proc import ClusterError, run

BUCKET = "everstep"
SYSTEM = "everstep-system"
LEASE = "everstep-operator"
MANIFESTS = TESTS / "cluster" / "manifests"
SCRIPTS_FOLDER = "/scripts"  # in workers, for scripts that are not in the image
KILL_PROCESS = Path(training_processes.__file__).read_text()
# What these take, another test's job has too.
SHARED = ("kill-node", "pause-node", "drain-node", "flap-node", "kill-operator", "restart-store")
QUOTA = "few-pods"
STARTED = 120.0  # seconds until pods run, or nodes take them


@dataclass
class Job(Player):
    """One digits job in a namespace of its own."""

    cluster: Cluster
    namespace: str
    name: str = "digits"
    killed_nodes: list[str] = field(default_factory=list)  # or paused
    drained_nodes: list[str] = field(default_factory=list)

    def kubectl(self, *arguments: str, input: str | None = None, check: bool = True) -> str:
        done = self.cluster.kubectl("-n", self.namespace, *arguments, input=input)
        if check and done.returncode != 0:
            raise ScenarioError(f"kubectl {shlex.join(arguments)}: {done.stderr.strip()}")
        return str(done.stdout)

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.namespace}/{self.name}"

    # What a user does.

    def prepare(self) -> None:
        self.cluster.kubectl("create", "namespace", self.namespace)
        data = {k: base64.b64encode(v.encode()).decode() for k, v in self.cluster.s3_in_cluster.env.items()}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3-credentials"}, "data": data}
        self.kubectl("apply", "-f", "-", input=json.dumps(secret))
        self.cluster.s3.bucket(BUCKET)

    def submit(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", input=json.dumps(manifest))

    def submit_together(self, manifest: dict[str, Any]) -> None:
        _, *others = self.node_names()
        self.cluster.kubectl("cordon", *others)
        try:
            self.submit(manifest)
            wait_for("all workers run", self._all_run, STARTED)
        finally:
            self.cluster.kubectl("uncordon", *others)

    def _all_run(self) -> bool:
        return [pod["status"].get("phase") for pod in self.pods()] == ["Running"] * self.workers

    def manifest(self, asked: Asked) -> dict[str, Any]:
        """A script that is not in the image comes as a ConfigMap."""
        manifest = super().manifest(asked)
        template = manifest["spec"]["template"]["spec"]
        worker = template["containers"][0]
        if worker["command"][1].startswith(SCRIPTS_FOLDER):
            template["volumes"] = [{"name": "scripts", "configMap": {"name": "scripts"}}]
            worker["volumeMounts"] = [{"name": "scripts", "mountPath": SCRIPTS_FOLDER}]
        return manifest

    def script_path(self, script: Path) -> str:
        if script.parent == EXAMPLE:
            return script.name  # the image's folder
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scripts"}}
        self.kubectl("apply", "-f", "-", input=json.dumps({**body, "data": {script.name: script.read_text()}}))
        return f"{SCRIPTS_FOLDER}/{script.name}"

    def etcd(self) -> str:
        self.cluster.kubectl("apply", "-f", str(MANIFESTS / "etcd.yaml"))
        done = self.cluster.kubectl("-n", "etcd", "rollout", "status", "deploy/etcd", "--timeout=60s")
        if done.returncode != 0:
            raise ScenarioError(f"etcd does not start: {done.stdout}{done.stderr}")
        return "http://etcd.etcd.svc:2379"

    def elastic(self, steps: int, pause: float, *arguments: str) -> dict[str, Any]:
        """The elastic example's own manifest (three workers, two to four), small enough for the test cluster."""
        manifest: dict[str, Any] = yaml.safe_load((EXAMPLE / "elastic.yaml").read_text())
        manifest["metadata"]["name"] = self.name
        manifest["spec"]["checkpoint"].update(url=self.url, everySteps=100)
        worker = manifest["spec"]["template"]["spec"]["containers"][0]
        worker["command"] += ["--steps", str(steps), "--step-seconds", str(pause), *arguments]
        worker["resources"]["requests"] = {"cpu": "50m", "memory": "200Mi"}
        return manifest

    def pod(self, index: int) -> dict[str, Any]:
        """The newest pod of worker `index`."""
        found = self.pods(f"everstep.dev/worker-index={index}")
        if not found:
            raise ScenarioError(f"worker {index} has no pod\n{self.describe()}")
        return max(found, key=newness)

    def newest_pods(self) -> dict[int, dict[str, Any]]:
        """By worker index, the newest pod that is not being deleted."""
        alive = [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]
        return {int(p["metadata"]["labels"]["everstep.dev/worker-index"]): p for p in sorted(alive, key=newness)}

    def containers(self) -> dict[str, tuple[str, int]]:
        """Of each pod that is not being deleted its uid, and how often its container was started again."""
        return {
            pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
            for pod in self.newest_pods().values()
        }

    def pods(self, selector: str = "") -> list[dict[str, Any]]:
        labels = ",".join(filter(None, [f"everstep.dev/job={self.name}", selector]))
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-l", labels, "-o", "json"))["items"]
        return items

    def status(self) -> dict[str, Any]:
        got = json.loads(self.kubectl("get", "tjob", self.name, "-o", "json"))
        status: dict[str, Any] = got.get("status", {})
        return status

    def delete_pods(self, indices: list[int]) -> None:
        names = [self.pod(index)["metadata"]["name"] for index in indices]

        def fault() -> None:
            self.kubectl("delete", "pod", *names, "--wait=false")

        self.inject(fault)

    def kill_process(self, index: int) -> None:
        pod = self.pod(index)
        name = pod["metadata"]["name"]
        if (node := pod["spec"].get("nodeName", "")) in self.killed_nodes:
            raise ScenarioError(f"worker {index} is on {node}, which is paused or down: nothing can be run in it")
        self.inject(lambda: killed_at(self.kubectl("exec", name, "-c", "worker", "--", "python3", "-c", KILL_PROCESS)))

    def kill_torchrun(self, index: int) -> None:
        """The pod's first process, which is a role's script where there is no launcher. A container cannot kill its own
        PID 1, so it is done from the node, as the kernel's OOM killer would."""
        pod = self.pod(index)
        script = (
            f"for p in /proc/[0-9]*; do grep -qs 'pod{pod['metadata']['uid']}' $p/cgroup "
            "&& tr '\\0' ' ' <$p/cmdline | grep -qE 'torchrun|torch.distributed.run|everstep-run|^python train.py' "
            "&& kill -9 ${p#/proc/} && date '+killed %s.%N'; done; true"
        )
        done = ("docker", "exec", pod["spec"].get("nodeName", ""), "bash", "-c", script)

        def fault() -> float:
            try:
                return killed_at(run(*done))
            except ClusterError as e:
                raise ScenarioError(f"worker {index}: {e}") from e

        self.inject(fault)

    def kill_node(self, name: str) -> None:
        self.killed_nodes.append(name)
        self.inject(lambda: self.cluster.kill_node(name))

    def pause_node(self, name: str) -> None:
        self.killed_nodes.append(name)
        self.inject(lambda: self.cluster.pause_node(name))

    def set_quota(self, pods: int | None) -> None:
        self.kubectl("delete", "quota", QUOTA, "--ignore-not-found")
        if pods is not None:
            self.kubectl("create", "quota", QUOTA, f"--hard=pods={pods}")

    def drain_node(self, name: str) -> None:
        """As far as the disruption budget lets it come in a short time; the node takes no pods afterwards."""
        self.drained_nodes.append(name)
        options = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=15s")

        def drain() -> None:
            self.cluster.kubectl("drain", name, *options)

        self.inject(drain)

    def start_nodes(self) -> None:
        for node in self.killed_nodes:
            self.cluster.start_node(node)
        for node in self.drained_nodes:
            self.cluster.kubectl("uncordon", node)
        if self.killed_nodes:
            self.cluster.wait_ready()
        self.killed_nodes.clear()
        self.drained_nodes.clear()

    def node_of(self, index: int) -> str:
        return str(self.pod(index)["spec"]["nodeName"])

    def indices(self) -> list[int]:
        return sorted(self.newest_pods())

    def leader(self) -> str:
        """The name of the operator pod that holds the Lease."""
        done = self.cluster.kubectl("-n", SYSTEM, "get", "lease", LEASE, "-o", "jsonpath={.spec.holderIdentity}")
        return str(done.stdout).split("_")[0]

    def kill_operator(self) -> None:
        self.cluster.kubectl("-n", SYSTEM, "delete", "pod", self.leader(), "--force", "--grace-period=0")

    def restart_store(self) -> None:
        self.cluster.kubectl("-n", "s3", "delete", "pod", "-l", "app=s3", "--force", "--grace-period=0")

    def scale(self, replicas: int) -> None:
        self.workers = replicas

        def change() -> None:
            self.kubectl("scale", f"tjob/{self.name}", f"--replicas={replicas}")

        self.inject(change)

    def suspend(self, wanted: bool) -> None:
        patch = json.dumps({"spec": {"suspend": wanted}})

        def change() -> None:
            self.kubectl("patch", "tjob", self.name, "--type=merge", "-p", patch)

        self.inject(change)

    def until_complete(self, seconds: float = SECONDS) -> None:
        self.until_condition("Complete", seconds)

    def until_condition(self, condition: str, seconds: float = SECONDS) -> None:
        """`kubectl wait`, as a user would, in slices that the bound on one command allows."""
        deadline = time.monotonic() + BUSY * seconds
        wait = ("wait", f"--for=condition={condition}", f"tjob/{self.name}", "--timeout=30s")
        while (done := self.cluster.kubectl("-n", self.namespace, *wait)).returncode != 0:
            over = self.over  # read once: another thread writes it
            if over == condition:
                return
            if over or time.monotonic() > deadline or "timed out" not in done.stderr:
                raise ScenarioError(f"not {condition}: {done.stderr}\n{self.describe()}")

    def expect_ended(self) -> None:
        def running() -> list[str]:
            return [p["metadata"]["name"] for p in self.pods() if p["status"]["phase"] in ("Pending", "Running")]

        try:
            wait_for("no pod of a job that is complete runs", lambda: not running(), 40)
        except ScenarioError as e:
            raise ScenarioError(f"{e}: {running()}\n{self.describe()}") from e

    def pod_names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.newest_pods().values()]

    def nodes_of_pods(self) -> list[str]:
        return [p["spec"].get("nodeName", "") for p in self.pods()]

    def node_names(self) -> list[str]:
        return list(self.cluster.workers())

    def logs(self) -> dict[str, str]:
        names = [pod["metadata"]["name"] for pod in self.pods()]
        return {name: self.kubectl("logs", name, "-c", "worker", check=False) for name in names}

    def storage_environment(self) -> Mapping[str, str]:
        return dict(self.cluster.s3.env)

    def describe(self) -> str:
        """Everything that a person would look at."""
        parts = [
            self.kubectl("describe", "tjob", self.name, check=False),
            self.kubectl("get", "pods", "-o", "wide", check=False),
        ]
        for pod in self.pods()[:4]:
            name = pod["metadata"]["name"]
            parts.append(f"--- {name}\n" + self.kubectl("logs", name, "--tail=15", check=False))
        logs = self.cluster.kubectl("-n", SYSTEM, "logs", "-l", "app.kubernetes.io/name=everstep", "--tail=25")
        return "\n".join([*parts, "--- operator", str(logs.stdout)])

    def remove(self) -> None:
        self.start_nodes()
        self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=false")


def takes_from_others(text: str) -> bool:
    """Whether a scenario needs the cluster for itself."""
    return any(line.removeprefix("maybe ").startswith(SHARED) or "together=yes" in line for line in text.splitlines())


def newness(pod: Mapping[str, Any]) -> list[int]:
    """The newer of a worker's pods has more. Where agents form the rounds, pods carry none, only an incarnation."""
    labels = pod["metadata"]["labels"]
    return [int(labels.get(f"everstep.dev/{name}", 0)) for name in ("round", "incarnation")]


def killed_at(output: str) -> float:
    """When the kill was done, as its own output says."""
    lines = [line.split() for line in output.splitlines() if line.startswith("killed ")]
    if not lines:
        raise ScenarioError(f"there was nothing to kill: {output!r}")
    return float(lines[0][1])
