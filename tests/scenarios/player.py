"""Plays scenarios: what a user does to a job, whatever the job runs on. A kind of place is a subclass of `Player`."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from ranks import Ranks
from warm_python import warm

from everstep_operator.plan.elastic import INCIDENT

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "digits"
APART = INCIDENT + timedelta(seconds=1)  # losses closer to each other are charged once; the status tells whole seconds
FINAL = re.compile(
    r"samples=(?P<samples>\d+) samples_xxh3=(?P<samples_hash>\w+)\s+"
    r"final step=\d+ loss=\S+ test_accuracy=(?P<accuracy>[\d.]+) parameters_xxh3=(?P<parameters>\w+)"
)


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
    """The same script in so many ranks on this machine, without an operator, a launcher and a fault."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_"))}
    with tempfile.TemporaryDirectory(prefix="everstep-reference-") as folder:
        argv = [EXAMPLE / "train.py", "--steps", steps, "--checkpoint", f"{folder}/commits", "--every-steps", 100]
        printed = Path(folder) / "printed.txt"
        ranks = Ranks(warm(), workers, argv, printed, environment)
        try:
            ranks.wait(180)
        finally:
            ranks.kill()
        result = Result.parse(printed.read_text())
        if result is None:
            raise ScenarioError(f"the undisturbed run failed:\n{printed.read_text()[-4000:]}")
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


def round_of(status: Mapping[str, Any]) -> int:
    """The world's; 0 before there is one."""
    return int((status.get("world") or {}).get("round", 0))


def newest_recovery(status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Its record, if the job has recovered from anything."""
    return next(iter(status.get("recoveries") or ()), None)


class Player(ABC):
    """One digits job, and what can be done to it and read of it. `play` runs a scenario text."""

    name: str
    steps: int = 0
    workers: int = 0
    injected_at: float = 0.0  # seconds since the epoch
    round_before: int = 1
    recovery_before: Mapping[str, Any] | None = None

    # What a place provides.

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the job's commits go, as it is written in the job."""

    @abstractmethod
    def submit(self, manifest: dict[str, Any]) -> None:
        """Apply the job."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """`status` of the job."""

    @abstractmethod
    def delete_pod(self, index: int) -> None: ...

    @abstractmethod
    def kill_process(self, index: int) -> None: ...

    @abstractmethod
    def kill_torchrun(self, index: int) -> None: ...

    @abstractmethod
    def kill_node_of(self, index: int) -> None: ...

    @abstractmethod
    def start_nodes(self) -> None: ...

    @abstractmethod
    def kill_operator(self) -> None: ...

    @abstractmethod
    def restart_store(self) -> None: ...

    @abstractmethod
    def scale(self, replicas: int) -> None: ...

    @abstractmethod
    def suspend(self, wanted: bool) -> None: ...

    @abstractmethod
    def nodes_of_pods(self) -> list[str]:
        """The node of each pod that the job has."""

    @abstractmethod
    def node_names(self) -> list[str]:
        """The nodes that may run workers."""

    @abstractmethod
    def logs(self) -> list[str]:
        """What each worker printed, one text a pod."""

    @abstractmethod
    def storage_environment(self) -> Mapping[str, str]:
        """What a reader of `url` on this machine needs in its environment."""

    @abstractmethod
    def until_complete(self, seconds: int = 240) -> None:
        """Wait as a user would."""

    @abstractmethod
    def describe(self) -> str:
        """Everything that a person would look at."""

    # What a user does.

    def manifest(self, workers: int, steps: int, pause: float, every: int, backend: str = "everstep") -> dict[str, Any]:
        """The example's own manifest with the sizes of the scenario; under `c10d` stock torchrun runs it."""
        manifest: dict[str, Any] = yaml.safe_load((EXAMPLE / "trainingjob.yaml").read_text())
        manifest["metadata"]["name"] = self.name
        spec = manifest["spec"]
        spec["replicas"] = workers
        spec["checkpoint"].update(url=self.url, everySteps=every)
        worker = spec["template"]["spec"]["containers"][0]
        spec["rendezvous"] = {"backend": backend}
        worker["command"][0] = "torchrun" if backend == "c10d" else "everstep-run"
        worker["command"] += ["--steps", str(steps), "--step-seconds", str(pause)]
        # Small enough that four of them and the cluster's own pods fit on two cores.
        worker["resources"]["requests"] = {"cpu": "50m", "memory": "200Mi"}
        return manifest

    def apply(self, workers: int, steps: int, pause: float, every: int, backend: str = "everstep") -> None:
        self.workers, self.steps = workers, steps
        self.submit(self.manifest(workers, steps, pause, every, backend))

    def inject(self, fault: Callable[[], float | None]) -> None:
        """Do it, and remember in which round, after which recovery and when: the moment that `fault` returns, or when
        it was called."""
        status = self.status()
        self.round_before = round_of(status)
        self.recovery_before = newest_recovery(status)
        began = time.time()
        self.injected_at = fault() or began

    # What a user waits for.

    def until_step(self, step: int, field_: str = "progress.step") -> None:
        self._wait(f"{field_} >= {step}", lambda: self.reached(field_) >= step)

    def reached(self, field_: str) -> int:
        """The step that this field of the status says, or a place knows to be what it will say; -1 without one."""
        value: Any = self.status()
        for part in field_.split("."):
            value = (value or {}).get(part)
        return -1 if value is None else int(value)

    def until_lost(self) -> None:
        self._wait("a new round", lambda: round_of(self.status()) > self.round_before)

    def until_recovered(self) -> dict[str, Any]:
        """The record of the recovery from the last injected fault."""

        def recovered() -> dict[str, Any] | None:
            status = self.status()
            newest = newest_recovery(status)
            # The agents' round may be known before the loss: the record of an earlier one is then still the newest.
            done = round_of(status) > self.round_before and newest not in (None, self.recovery_before)
            return newest if done and newest is not None and "firstStepMs" in newest else None

        found: dict[str, Any] | None = self._wait("every rank's next step", recovered)
        assert found is not None
        return found

    def _wait(self, what: str, probe: Callable[[], T], seconds: float = 120) -> T:
        try:
            return wait_for(what, probe, seconds)
        except ScenarioError as e:
            raise ScenarioError(f"{e}\n{self.describe()}") from e

    def until_apart(self) -> None:
        """The next loss is an incident of its own: the last one began long enough ago."""

        def over() -> bool:
            began = self.status()["restarts"].get("incidentAt")
            return began is not None and datetime.now(UTC) - datetime.fromisoformat(began) > APART

        self._wait("the end of the incident", over)

    # What a user sees.

    def result(self) -> Result:
        logs = self.logs()
        # A fault after the last step lets the next world print the result again: it has to be the same.
        found = {r for log in logs if (r := Result.parse(log)) is not None}
        if len(found) != 1:
            raise ScenarioError(f"{len(found)} different results were printed, expected one\n" + "\n".join(logs))
        return found.pop()

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
        environment = {**os.environ, **self.storage_environment()}
        script = "import sys, everstep; print('\\n'.join(everstep.Checkpointer(sys.argv[1]).verify()))"
        done = warm().run("-c", script, self.url, env=environment, timeout=60)
        if done.returncode != 0 or done.stdout.strip():
            raise ScenarioError(f"commits do not verify: {done.stdout}{done.stderr[-1000:]}")

    def expect_spread(self, most: int) -> None:
        nodes = self.nodes_of_pods()
        counts = {n: nodes.count(n) for n in self.node_names()}
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
                figures = int(size["workers"]), int(size["steps"]), float(size["pause"]), int(size["every"])
                self.apply(*figures, size.get("backend", "everstep"))
            case ["until", "step", step]:
                self.until_step(int(step))
            case ["until", "committed", step]:
                self.until_step(int(step), "checkpoint.lastCommittedStep")
            case ["until", "lost"]:
                self.until_lost()
            case ["until", "recovered"]:
                self.until_recovered()
            case ["until", "apart"]:
                self.until_apart()
            case ["until", "no-pods"]:
                self._wait("no pods", lambda: not self.nodes_of_pods())
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
