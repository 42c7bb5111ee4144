"""Plays scenarios on a cluster with nodes. Everything is done as a user would do it: kubectl, kill, docker kill."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from testcluster.handle import Cluster
from testcluster.proc import run

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "digits"
BUCKET = "everstep"
SYSTEM = "everstep-system"
LEASE = "everstep-operator"
FINAL = re.compile(
    r"samples=(?P<samples>\d+) samples_xxh3=(?P<samples_hash>\w+)\s+"
    r"final step=\d+ loss=\S+ test_accuracy=(?P<accuracy>[\d.]+) parameters_xxh3=(?P<parameters>\w+)"
)
# Kill the training process, never torchrun (PID 1 of the container), never ourselves.
KILL_PROCESS = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    command = open(f"/proc/{pid}/cmdline", "rb").read()
    if pid != "1" and int(pid) != os.getpid() and b"train.py" in command:
        os.kill(int(pid), 9)
        print(pid)
"""


class ScenarioError(AssertionError):
    """An expectation did not hold; the text has the job's state for whoever reads the log."""


@dataclass(frozen=True)
class Result:
    """What the last lines of a finished run say."""

    samples: int
    samples_hash: str
    parameters: str
    accuracy: float

    @classmethod
    def parse(cls, log: str) -> Result | None:
        found = FINAL.search(log)
        if found is None:
            return None
        return cls(int(found["samples"]), found["samples_hash"], found["parameters"], float(found["accuracy"]))


@cache
def undisturbed(workers: int, steps: int) -> Result:
    """The same script under stock torchrun on this machine, without an operator and without a fault."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers), "--standalone"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_"))}
    folder = f"/tmp/everstep-reference-{secrets.token_hex(4)}"
    done = subprocess.run(
        [*command, str(EXAMPLE / "train.py"), "--steps", str(steps), "--checkpoint", folder, "--every-steps", "100"],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        check=False,
    )
    run("rm", "-rf", folder)
    result = Result.parse(done.stdout)
    if result is None:
        raise ScenarioError(f"the undisturbed run failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return result


def wait_for(what: str, probe: Callable[[], T], seconds: float = 120, poll: float = 0.25) -> T:
    """The first true value of `probe`; ScenarioError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if value := probe():
            return value
        if time.monotonic() > deadline:
            raise ScenarioError(f"{what}: not within {seconds:g} s")
        time.sleep(poll)


@dataclass
class Job:
    """One digits job in a namespace of its own."""

    cluster: Cluster
    namespace: str
    name: str = "digits"
    steps: int = 0
    workers: int = 0
    injected_at: float = 0.0
    round_before: int = 1
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

    def manifest(self, workers: int, steps: int, pause: float, every: int) -> dict[str, Any]:
        """The example's own manifest with the sizes of the scenario."""
        manifest: dict[str, Any] = yaml.safe_load((EXAMPLE / "trainingjob.yaml").read_text())
        manifest["metadata"]["name"] = self.name
        spec = manifest["spec"]
        spec["replicas"] = workers
        spec["checkpoint"].update(url=self.url, everySteps=every)
        worker = spec["template"]["spec"]["containers"][0]
        worker["command"] += ["--steps", str(steps), "--step-seconds", str(pause)]
        # Small enough that four of them and the cluster's own pods fit on two cores.
        worker["resources"]["requests"] = {"cpu": "50m", "memory": "200Mi"}
        return manifest

    def apply(self, workers: int, steps: int, pause: float, every: int) -> None:
        self.workers, self.steps = workers, steps
        self.kubectl("apply", "-f", "-", input=json.dumps(self.manifest(workers, steps, pause, every)))

    def pod(self, index: int) -> dict[str, Any]:
        """The pod of worker `index` in the newest round."""
        found = self.pods(f"everstep.dev/worker-index={index}")
        if not found:
            raise ScenarioError(f"worker {index} has no pod\n{self.describe()}")
        newest: dict[str, Any] = max(found, key=lambda p: int(p["metadata"]["labels"]["everstep.dev/round"]))
        return newest

    def pods(self, selector: str = "") -> list[dict[str, Any]]:
        labels = ",".join(filter(None, [f"everstep.dev/job={self.name}", selector]))
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-l", labels, "-o", "json"))["items"]
        return items

    def status(self) -> dict[str, Any]:
        got = json.loads(self.kubectl("get", "tjob", self.name, "-o", "json"))
        status: dict[str, Any] = got.get("status", {})
        return status

    def inject(self, fault: Callable[[], object]) -> None:
        """Do it, and remember when and in which round."""
        self.round_before = self.status()["world"]["round"]
        self.injected_at = time.time()
        fault()

    def delete_pod(self, index: int) -> None:
        name = self.pod(index)["metadata"]["name"]
        self.inject(lambda: self.kubectl("delete", "pod", name, "--wait=false"))

    def kill_process(self, index: int) -> None:
        name = self.pod(index)["metadata"]["name"]
        self.inject(lambda: self.kubectl("exec", name, "-c", "worker", "--", "python3", "-c", KILL_PROCESS))

    def kill_torchrun(self, index: int) -> None:
        """A container cannot kill its own PID 1, so it is done from the node, as the kernel's OOM killer would."""
        pod = self.pod(index)
        script = (
            f"for p in /proc/[0-9]*; do grep -qs 'pod{pod['metadata']['uid']}' $p/cgroup "
            "&& tr '\\0' ' ' <$p/cmdline | grep -q torchrun && kill -9 ${p#/proc/} && echo killed; done; true"
        )
        node = pod["spec"]["nodeName"]

        def fault() -> None:
            if "killed" not in run("docker", "exec", node, "bash", "-c", script):
                raise ScenarioError(f"no torchrun found on {node} for {pod['metadata']['name']}")

        self.inject(fault)

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
        self.inject(lambda: self.kubectl("scale", f"tjob/{self.name}", f"--replicas={replicas}"))

    def suspend(self, wanted: bool) -> None:
        patch = json.dumps({"spec": {"suspend": wanted}})
        self.inject(lambda: self.kubectl("patch", "tjob", self.name, "--type=merge", "-p", patch))

    # What a user waits for.

    def until_step(self, step: int, field_: str = "progress.step") -> None:
        def reached() -> bool:
            value: Any = self.status()
            for part in field_.split("."):
                value = (value or {}).get(part)
            return value is not None and value >= step

        self._wait(f"{field_} >= {step}", reached)

    def until_lost(self) -> None:
        self._wait("a new round", lambda: self.status()["world"]["round"] > self.round_before)

    def until_recovered(self) -> dict[str, Any]:
        """The record of the recovery from the last injected fault."""

        def recovered() -> dict[str, Any] | None:
            status = self.status()
            newest = (status.get("recoveries") or [{}])[0]
            done = status["world"]["round"] > self.round_before and "firstStepMs" in newest
            return newest if done else None

        found: dict[str, Any] | None = self._wait("every rank's next step", recovered)
        assert found is not None
        return found

    def until_complete(self, seconds: int = 240) -> None:
        """`kubectl wait`, as a user would, in slices that the bound on one command allows."""
        deadline = time.monotonic() + seconds
        wait = ("wait", "--for=condition=Complete", f"tjob/{self.name}", "--timeout=30s")
        while (done := self.cluster.kubectl("-n", self.namespace, *wait)).returncode != 0:
            if time.monotonic() > deadline or "timed out" not in done.stderr:
                raise ScenarioError(f"not complete: {done.stderr}\n{self.describe()}")

    def _wait(self, what: str, probe: Callable[[], T], seconds: float = 120) -> T:
        try:
            return wait_for(what, probe, seconds)
        except ScenarioError as e:
            raise ScenarioError(f"{e}\n{self.describe()}") from e

    # What a user sees.

    def result(self) -> Result:
        logs = [self.kubectl("logs", p["metadata"]["name"], "-c", "worker", check=False) for p in self.pods()]
        found = [r for log in logs if (r := Result.parse(log)) is not None]
        if len(found) != 1:
            raise ScenarioError(f"{len(found)} workers printed a result, expected rank 0 alone\n" + "\n".join(logs))
        return found[0]

    def expect_undisturbed(self) -> None:
        got, wanted = self.result(), undisturbed(self.workers, self.steps)
        if got != wanted:
            raise ScenarioError(f"got {got}\nan undisturbed run gives {wanted}\n{self.describe()}")
        self.expect_samples()

    def expect_samples(self) -> None:
        """Each step trained on its own samples exactly once in the lineage of the parameters; no commit is torn."""
        got, wanted = self.result(), undisturbed(1, self.steps)
        if (got.samples, got.samples_hash) != (wanted.samples, wanted.samples_hash):
            raise ScenarioError(f"samples: got {got}\nexpected {wanted}")
        if got.accuracy < 0.95:
            raise ScenarioError(f"test accuracy is {got.accuracy}")
        self.verify_commits()

    def verify_commits(self) -> None:
        """Every commit that retention kept is whole, read by the library from outside the cluster."""
        environment = {**os.environ, **self.cluster.s3.env}
        script = "import sys, everstep; print('\\n'.join(everstep.Checkpointer(sys.argv[1]).verify()))"
        done = subprocess.run(
            [sys.executable, "-c", script, self.url],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0 or done.stdout.strip():
            raise ScenarioError(f"commits do not verify: {done.stdout}{done.stderr[-1000:]}")

    def expect_spread(self, most: int) -> None:
        nodes = [p["spec"]["nodeName"] for p in self.pods()]
        counts = {n: nodes.count(n) for n in self.cluster.workers()}
        if any(not 0 < c <= most for c in counts.values()):
            raise ScenarioError(f"workers by node: {counts}")

    def expect_restarts(self, kind: str, count: int) -> None:
        restarts = self.status()["restarts"]
        if restarts.get(kind, 0) != count:
            raise ScenarioError(f"restarts are {restarts}, expected {kind}={count}\n{self.describe()}")

    def expect_cause(self, cause: str) -> None:
        newest = self.status()["recoveries"][0]
        if newest["cause"] != cause:
            raise ScenarioError(f"the newest recovery is {newest}, expected cause {cause}\n{self.describe()}")

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

    def play(self, text: str) -> None:
        """Run a scenario; an error names its line."""
        for number, line in enumerate(text.splitlines(), 1):
            words = shlex.split(line, comments=True)
            if not words:
                continue
            try:
                self._step(words)
            except ScenarioError as e:
                raise ScenarioError(f"line {number}: {line}\n{e}") from e

    def _step(self, words: list[str]) -> None:
        match words:
            case ["job", *sizes]:
                size = dict(s.split("=") for s in sizes)
                self.apply(int(size["workers"]), int(size["steps"]), float(size["pause"]), int(size["every"]))
            case ["until", "step", step]:
                self.until_step(int(step))
            case ["until", "committed", step]:
                self.until_step(int(step), "checkpoint.lastCommittedStep")
            case ["until", "lost"]:
                self.until_lost()
            case ["until", "recovered"]:
                self.until_recovered()
            case ["until", "no-pods"]:
                self._wait("no pods", lambda: not self.pods())
            case ["until", "complete"]:
                self.until_complete()
            case ["expect", "undisturbed"]:
                self.expect_undisturbed()
            case ["expect", "samples"]:
                self.expect_samples()
            case ["expect", "spread", most]:
                self.expect_spread(int(most))
            case ["expect", "restarts", count]:
                kind, number = count.split("=")
                self.expect_restarts(kind, int(number))
            case ["expect", "cause", cause]:
                self.expect_cause(cause)
            case [("suspend" | "resume") as verb]:
                self.suspend(verb == "suspend")
            case ["scale", replicas]:
                self.scale(int(replicas))
            case [("delete-pod" | "kill-process" | "kill-torchrun" | "kill-node-of") as verb, index]:
                getattr(self, verb.replace("-", "_"))(int(index))
            case [("kill-operator" | "restart-store" | "start-nodes") as verb]:
                getattr(self, verb.replace("-", "_"))()
            case _:
                raise ScenarioError(f"unknown line: {shlex.join(words)}")
