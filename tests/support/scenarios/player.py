"""Plays scenarios: what a user does to a job, whatever the job runs on. A kind of place is a subclass of `Player`."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import yaml

from everstep_operator.plan.decide.loss import INCIDENT
from support.processes.warm_python import warm
from support.scenarios import lines
from support.scenarios.lines import Asked
from support.scenarios.reference import (
    BESIDE,
    EXAMPLE,
    SCRIPTS,
    Committed,
    Result,
    ScenarioError,
    differences,
    rounding_of,
    undisturbed,
)

T = TypeVar("T")

APART = INCIDENT + timedelta(seconds=1)  # losses closer to each other are charged once; the status tells whole seconds
# Proved for so many workers, of either script.
EXACT = 3
TOGETHER = 90  # seconds for what a place does until all workers are on one node
LINE = re.compile(r"^(start|step)=?[ \d]", re.MULTILINE)  # what a script says when a process begins, and of its steps

STEP = re.compile(r"^step=(\d+) ", re.MULTILINE)
SECONDS = 120.0  # that one wait may take
FLAPS = (0.5, 2.0, 1.0)  # seconds that a flapping node stands still
BUSY = 3  # such bounds are for a machine with nothing else to do; others are so much slower


def wait_for(what: str, probe: Callable[[], T], seconds: float = SECONDS, poll: float = 0.25) -> T:
    """The first true value of `probe`; ScenarioError after `seconds`, and after more on a busy machine."""
    deadline = time.monotonic() + BUSY * seconds
    while True:
        if value := probe():
            return value
        if time.monotonic() > deadline:
            raise ScenarioError(f"{what}: not within {BUSY * seconds:g} s")
        time.sleep(poll)


def round_of(status: Mapping[str, Any]) -> int:
    """The world's; 0 before there is one."""
    return int((status.get("world") or {}).get("round", 0))


def newest_recovery(status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Its record, if the job has recovered from anything."""
    return next(iter(status.get("recoveries") or ()), None)


class Player(ABC):
    """One job, and what can be done to it and read of it. `play` runs a scenario text."""

    name: str
    asked: Asked
    workers: int = 0
    sizes_seen: set[int]  # that it was asked to have
    injected_at: float = 0.0  # seconds since the epoch
    round_before: int = 1
    said: int = 0  # the step that workers had said when they were suspended
    recovery_before: Mapping[str, Any] | None = None
    # Of the text that is played: the faults that were done to the job, and those that could not be, with the reason.
    struck: list[str]
    left_out: list[str]

    # What a place provides.

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the job's commits go, as it is written in the job."""

    @abstractmethod
    def submit(self, manifest: dict[str, Any]) -> None:
        """Apply the job."""

    @abstractmethod
    def submit_together(self, manifest: dict[str, Any]) -> None:
        """Apply the job, and come back when all workers run on one node; the others take pods by then."""

    @abstractmethod
    def script_path(self, script: Path) -> str:
        """Where workers find a copy of this file."""

    @abstractmethod
    def etcd(self) -> str:
        """The URL of an etcd that workers reach."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """`status` of the job."""

    @abstractmethod
    def delete_pods(self, indices: list[int]) -> None: ...

    def delete_pod(self, index: int) -> None:
        self.delete_pods([index])

    @abstractmethod
    def kill_process(self, index: int) -> None: ...

    @abstractmethod
    def kill_torchrun(self, index: int) -> None: ...

    @abstractmethod
    def kill_node(self, name: str) -> None: ...

    def kill_node_of(self, index: int) -> None:
        self.kill_node(self.node_of(index))

    @abstractmethod
    def pause_node(self, name: str) -> None:
        """Its processes stand still, and its connections stay open."""

    def flap_node(self, name: str) -> None:
        """It stands still and goes on, three times; other nodes are all there."""
        for seconds in FLAPS:
            self.pause_node(name)
            time.sleep(seconds)
            self.start_nodes()

    def set_quota(self, pods: int | None) -> None:
        """So many pods may exist at a time; None: any number. Only where a place has quotas."""
        raise ScenarioError(f"quota {pods}: this place has none")

    @abstractmethod
    def drain_node(self, name: str) -> None:
        """Take its pods away in order, and let it take no new ones, where a place knows that."""

    @abstractmethod
    def start_nodes(self) -> None:
        """Bring back what was killed, paused or drained."""

    @abstractmethod
    def kill_operator(self) -> None: ...

    @abstractmethod
    def restart_store(self) -> None: ...

    @abstractmethod
    def scale(self, replicas: int) -> None: ...

    @abstractmethod
    def suspend(self, wanted: bool) -> None: ...

    @abstractmethod
    def node_of(self, index: int) -> str: ...

    @abstractmethod
    def indices(self) -> list[int]:
        """Workers that have a pod."""

    @abstractmethod
    def pod_names(self) -> list[str]:
        """The newest pod of each worker."""

    @abstractmethod
    def nodes_of_pods(self) -> list[str]:
        """The node of each pod that the job has."""

    @abstractmethod
    def node_names(self) -> list[str]:
        """The nodes that may run workers."""

    @abstractmethod
    def logs(self) -> dict[str, str]:
        """What each worker printed, by the name of its pod."""

    @abstractmethod
    def storage_environment(self) -> Mapping[str, str]:
        """What a reader of `url` on this machine needs in its environment."""

    @abstractmethod
    def expect_ended(self) -> None:
        """Nothing of a job that is complete runs any more."""

    @abstractmethod
    def until_complete(self, seconds: float = SECONDS) -> None:
        """Wait as a user would."""

    @abstractmethod
    def describe(self) -> str:
        """Everything that a person would look at."""

    # What a user does.

    def manifest(self, asked: Asked) -> dict[str, Any]:
        """The example's own manifest with what the scenario asks for."""
        manifest: dict[str, Any] = yaml.safe_load((EXAMPLE / f"{asked.example or 'trainingjob'}.yaml").read_text())
        manifest["metadata"]["name"] = self.name
        spec = manifest["spec"]
        worker = spec["template"]["spec"]["containers"][0]
        # Small enough that four of them and the cluster's own pods fit on two cores.
        worker["resources"]["requests"] = {"cpu": "50m", "memory": "200Mi"}
        script, *_ = [self.script_path(path) for path in (SCRIPTS[asked.script], *BESIDE.get(asked.script, ()))]
        if asked.restarts is not None:
            worker["env"] = [*worker.get("env", ()), {"name": "PET_MAX_RESTARTS", "value": str(asked.restarts)}]
        if asked.grace is not None:
            spec["template"]["spec"]["terminationGracePeriodSeconds"] = asked.grace
        if asked.example:
            spec["checkpoint"]["url"] = self.url
            told = {"DIGITS_STEPS": asked.steps, "DIGITS_STEP_SECONDS": asked.pause}
            worker["env"] = [*worker.get("env", ()), *({"name": k, "value": str(v)} for k, v in told.items())]
            return manifest
        spec["replicas"] = asked.workers
        if asked.sizes:
            fewest, most = map(int, asked.sizes.split(":"))
            spec["elastic"] = {"minReplicas": fewest, "maxReplicas": most, "spares": asked.spares}
        spec["checkpoint"].update(url=self.url, everySteps=asked.every)
        spec["rendezvous"] = {"backend": asked.backend}
        if asked.backend == "etcd":
            spec["rendezvous"]["etcd"] = {"endpoints": [self.etcd()]}
        worker["command"] = [asked.launcher, script, "--steps", str(asked.steps), "--step-seconds", str(asked.pause)]
        return manifest

    def apply(self, workers: int, steps: int, pause: float, every: int, **more: Any) -> None:
        self.ask_for(Asked(workers, steps, pause, every, **{"launcher": "everstep-run", **more}))

    def ask_for(self, asked: Asked) -> None:
        self.asked, self.workers, self.sizes_seen = asked, asked.workers, {asked.workers}
        if asked.together:
            self.submit_together(self.manifest(asked))
        else:
            self.submit(self.manifest(asked))

    def lose_processes(self, count: int) -> None:
        """One after the other; each time until its job trains again with a new process."""
        for number in range(count):
            before = self.told("start")
            self.kill_process(number % self.workers)
            self.wait("a new process trains", lambda before=before: len(self.told("start") - before) > 0)  # type: ignore[misc]
            self.until_training()

    def told(self, what: str) -> set[str]:
        """The lines of the workers' logs in which a script says that a process starts, or that a step is done."""
        return {
            f"{pod} {place} {line}"
            for pod, log in self.logs().items()
            for place, line in enumerate(log.splitlines())
            if (found := LINE.match(line)) and found[1] == what
        }

    def newest_step(self) -> int:
        """What the workers that there are have said last. What the status says may be of a world that was lost."""
        names = set(self.pod_names())
        steps = [STEP.findall(log) for pod, log in self.logs().items() if pod in names]
        return max((int(found[-1]) for found in steps if found), default=0)

    def until_training(self) -> None:
        """Until steps are said that were not said before."""
        before = self.told("step")
        self.wait("new steps", lambda: self.over or self.told("step") - before)

    @property
    def over(self) -> str | None:
        """How the job has ended: Complete or Failed; None if it has not."""
        ends = ("Complete", "Failed")
        conditions = self.status().get("conditions", ())
        return next((c["type"] for c in conditions if c["type"] in ends and c["status"] == "True"), None)

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
        self.wait(f"{field_} >= {step}", lambda: self.reached(field_) >= step)

    def reached(self, field_: str) -> int:
        """The step that this field of the status says, or a place knows to be what it will say; -1 without one."""
        value: Any = self.status()
        for part in field_.split("."):
            value = (value or {}).get(part)
        return -1 if value is None else int(value)

    def until_further(self, steps: int) -> None:
        """So many steps more than ever before; or the end."""
        before = self.reached("progress.step")
        self.wait(f"{steps} steps after {before}", lambda: self.over or self.reached("progress.step") >= before + steps)

    def until_lost(self) -> None:
        self.wait("a new round", lambda: round_of(self.status()) > self.round_before)

    def until_recovered(self) -> dict[str, Any]:
        """The record of the recovery from the last injected fault."""

        def recovered() -> dict[str, Any] | None:
            status = self.status()
            newest = newest_recovery(status)
            # The agents' round may be known before the loss: the record of an earlier one is then still the newest.
            done = round_of(status) > self.round_before and newest not in (None, self.recovery_before)
            return newest if done and newest is not None and "firstStepMs" in newest else None

        found: dict[str, Any] | None = self.wait("every rank's next step", recovered)
        assert found is not None
        return found

    def wait(self, what: str, probe: Callable[[], T], seconds: float = SECONDS) -> T:
        """As `wait_for`; a job that has failed will not do it any more."""

        def now() -> T:
            found = probe()
            if not found and self.over == "Failed":
                raise ScenarioError(f"{what}: the job has failed")
            return found

        try:
            return wait_for(what, now, seconds)
        except ScenarioError as e:
            raise ScenarioError(f"{e}\n{self.describe()}") from e

    def until_spares(self) -> None:
        """All spares wait."""

        def wait() -> bool:
            if self.over:
                raise ScenarioError(f"the job is {self.over} before its spares waited: give it more steps")
            spares = self.status().get("spares") or {}
            return bool(spares) and spares.get("ready") == spares["wanted"]

        self.wait("the spares wait", wait)

    def until_apart(self) -> None:
        """The next loss is an incident of its own: the last one began long enough ago."""

        def over() -> bool:
            began = self.status()["restarts"].get("incidentAt")
            return began is not None and datetime.now(UTC) - datetime.fromisoformat(began) > APART

        self.wait("the end of the incident", over)

    # What a user sees.

    def result(self) -> Result:
        logs = self.logs().values()
        # A fault after the last step lets the next world print the result again: it has to be the same.
        found = {r for log in logs if (r := Result.parse(log)) is not None}
        if len(found) != 1:
            raise ScenarioError(f"{len(found)} different results were printed, expected one\n" + "\n".join(logs))
        return found.pop()

    def expect_undisturbed(self) -> None:
        got, wanted = self.result(), undisturbed(self.workers, self.asked.steps, self.asked.script).result
        if got != wanted:
            raise ScenarioError(f"got {got}\nan undisturbed run gives {wanted}\n{self.describe()}")
        self.expect_samples()

    def expect_samples(self) -> None:
        """Each step trained on its own samples exactly once in the lineage of the parameters; no commit is torn."""
        got, wanted = self.result(), undisturbed(1, self.asked.steps, self.asked.script).result
        if (got.samples, got.samples_hash) != (wanted.samples, wanted.samples_hash):
            raise ScenarioError(f"samples: got {got}\nexpected {wanted}")
        if got.accuracy < 0.95:
            raise ScenarioError(f"test accuracy is {got.accuracy}")
        self.verify_commits()

    def expect_kept(self) -> None:
        """Of a job of the session that was suspended every step that its workers had said is in the newest commit, and
        the status names it."""
        committed = Committed.read(self.url, {**os.environ, **self.storage_environment()}).step
        if committed < self.said:
            raise ScenarioError(f"step {self.said} was said, and {committed} is committed\n{self.describe()}")

        def told() -> bool:
            return bool((self.status().get("checkpoint") or {}).get("lastCommittedStep") == committed)

        self.wait(f"the status names the commit of step {committed}", told, 20)

    def expect_outcome(self) -> None:
        """The last commit is that of a run that nobody touched: to the bit if the job could have one size only, of at
        most `EXACT` workers, else to the rounding of sums. All commits are whole, the budget has paid for nothing, and
        nothing of the job runs."""
        exact = not self.asked.sizes and self.sizes_seen == {self.workers} and self.workers <= EXACT
        wanted = undisturbed(self.workers if exact else 1, self.asked.steps, self.asked.script).committed
        got = Committed.read(self.url, {**os.environ, **self.storage_environment()})
        least = 0.0 if exact else rounding_of(self.workers, self.asked.steps, self.asked.script)
        if wrong := differences(got, wanted, rounding=least):
            raise ScenarioError("\n".join(["the training state is another one:", *wrong, self.describe()]))
        self.verify_commits()
        restarts = self.status().get("restarts") or {}
        if restarts.get("userCode", 0) or restarts.get("inWindow", 0):
            raise ScenarioError(f"restarts are {restarts}: nothing that was done is the program's fault")
        self.expect_ended()

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

    def expect_rung(self, rung: str) -> None:
        newest = self.status()["recoveries"][0]
        if newest["rung"] != rung:
            raise ScenarioError(f"the newest recovery is {newest}, expected rung {rung}\n{self.describe()}")

    def expect_repeated(self, steps: int) -> None:
        newest = self.status()["recoveries"][0]
        if newest.get("lostSteps") != steps:
            raise ScenarioError(f"the newest recovery is {newest}, expected {steps} repeated steps\n{self.describe()}")

    def play(self, text: str) -> None:
        """Run a scenario; an error names its line."""
        lines.play(self, text)
