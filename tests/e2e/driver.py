"""Jobs on a cluster with nodes. Everything is done as a user would do it: kubectl, kill, docker kill."""

from __future__ import annotations

import base64
import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scenarios"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "warm"))

import yaml
from player import EXAMPLE, Player, ScenarioError
from testcluster.handle import Cluster
from testcluster.proc import run

BUCKET = "everstep"
SYSTEM = "everstep-system"
LEASE = "everstep-operator"
# Kill the training process: torchrun starts the script, the warm parent of everstep-run forks it.
KILL_PROCESS = """
import os, time
def command(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return b""
def parent(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
    except OSError:
        return "0"
for pid in filter(str.isdigit, os.listdir("/proc")):
    if pid == "1" or int(pid) == os.getpid():
        continue
    if b"train.py" in command(pid) or b"everstep.agent.warm" in command(parent(pid)):
        os.kill(int(pid), 9)
        print("killed", time.time())
"""


@dataclass
class Job(Player):
    """One digits job in a namespace of its own."""

    cluster: Cluster
    namespace: str
    name: str = "digits"
    killed_nodes: list[str] = field(default_factory=list)

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

    def pods(self, selector: str = "") -> list[dict[str, Any]]:
        labels = ",".join(filter(None, [f"everstep.dev/job={self.name}", selector]))
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-l", labels, "-o", "json"))["items"]
        return items

    def status(self) -> dict[str, Any]:
        got = json.loads(self.kubectl("get", "tjob", self.name, "-o", "json"))
        status: dict[str, Any] = got.get("status", {})
        return status

    def delete_pod(self, index: int) -> None:
        name = self.pod(index)["metadata"]["name"]

        def fault() -> None:
            self.kubectl("delete", "pod", name, "--wait=false")

        self.inject(fault)

    def kill_process(self, index: int) -> None:
        name = self.pod(index)["metadata"]["name"]
        self.inject(lambda: killed_at(self.kubectl("exec", name, "-c", "worker", "--", "python3", "-c", KILL_PROCESS)))

    def kill_torchrun(self, index: int) -> None:
        """A container cannot kill its own PID 1, so it is done from the node, as the kernel's OOM killer would."""
        pod = self.pod(index)
        script = (
            f"for p in /proc/[0-9]*; do grep -qs 'pod{pod['metadata']['uid']}' $p/cgroup "
            "&& tr '\\0' ' ' <$p/cmdline | grep -qE 'torchrun|everstep-run' && kill -9 ${p#/proc/} "
            "&& date '+killed %s.%N'; done; true"
        )
        self.inject(lambda: killed_at(run("docker", "exec", pod["spec"]["nodeName"], "bash", "-c", script)))

    def kill_node_of(self, index: int) -> None:
        node = self.pod(index)["spec"]["nodeName"]
        self.killed_nodes.append(node)
        self.inject(lambda: self.cluster.kill_node(node))

    def start_nodes(self) -> None:
        for node in self.killed_nodes:
            self.cluster.start_node(node)
        if self.killed_nodes:
            self.cluster.wait_ready()
        self.killed_nodes.clear()

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

    def until_complete(self, seconds: int = 240) -> None:
        """`kubectl wait`, as a user would, in slices that the bound on one command allows."""
        deadline = time.monotonic() + seconds
        wait = ("wait", "--for=condition=Complete", f"tjob/{self.name}", "--timeout=30s")
        while (done := self.cluster.kubectl("-n", self.namespace, *wait)).returncode != 0:
            if time.monotonic() > deadline or "timed out" not in done.stderr:
                raise ScenarioError(f"not complete: {done.stderr}\n{self.describe()}")

    def nodes_of_pods(self) -> list[str]:
        return [p["spec"].get("nodeName", "") for p in self.pods()]

    def node_names(self) -> list[str]:
        return list(self.cluster.workers())

    def logs(self) -> list[str]:
        return [self.kubectl("logs", p["metadata"]["name"], "-c", "worker", check=False) for p in self.pods()]

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
