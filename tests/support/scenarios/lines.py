"""The words of scenario texts: what each line does to a `Player`. tests/scenarios/README.md has them for people."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from support.scenarios.reference import EXAMPLE, SCRIPTS, ScenarioError

if TYPE_CHECKING:
    from support.scenarios.player import Player


# What disturbs a job. One that has ended is not disturbed by it, whether the line can be carried out or not.
FAULTS = (
    "delete-pod", "kill-process", "kill-torchrun", "lose-processes", "kill-node-of", "kill-node", "pause-node",
    "drain-node", "drain-node-of", "flap-node", "kill-operator", "restart-store", "scale", "suspend", "quota",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A scenario's `job` line."""

    workers: int
    steps: int
    pause: float  # seconds a step
    every: int  # steps between commits
    backend: str = "everstep"
    launcher: str = ""
    script: str = "digits"
    sizes: str = ""  # FEWEST:MOST of an elastic job
    spares: int = 0  # beside the workers of an elastic job
    together: bool = False  # all workers on one node
    restarts: int | None = None  # PET_MAX_RESTARTS in the pod template; None: what the operator sets
    grace: int | None = None  # terminationGracePeriodSeconds of the pod template; None: what the cluster sets
    example: str = ""  # this manifest of examples/digits as it stands; all of the above that it has comes from it

    @classmethod
    def parse(cls, words: list[str]) -> Asked:
        """Raises `ScenarioError` naming the word."""
        given = dict(word.partition("=")[::2] for word in words)
        if "example" in given:
            given = {**of_example(given["example"]), **given}
        kinds: dict[str, Callable[[str], Any]] = {
            "workers": int, "steps": int, "pause": float, "every": int, "together": "yes".__eq__, "restarts": int,
            "spares": int, "grace": int,
        }  # fmt: skip
        try:
            asked = cls(**{key: kinds.get(key, str)(value) for key, value in given.items()})
        except (TypeError, ValueError) as e:
            raise ScenarioError(f"job {shlex.join(words)}: {e}") from e
        if asked.script not in SCRIPTS:
            raise ScenarioError(f"job: script={asked.script}: one of {', '.join(SCRIPTS)}")
        return replace(asked, launcher=asked.launcher or ("torchrun" if asked.backend == "c10d" else "everstep-run"))


def of_example(name: str) -> dict[str, str]:
    """The words of a `job` line for examples/digits/NAME.yaml. Raises `ScenarioError` if there is no such file."""
    path = EXAMPLE / f"{name}.yaml"
    if not path.exists():
        raise ScenarioError(f"job: example={name}: there is no {path}")
    spec = yaml.safe_load(path.read_text())["spec"]
    launcher, script, *_ = spec["template"]["spec"]["containers"][0]["command"]
    found = {
        "workers": spec["replicas"], "every": spec["checkpoint"]["everySteps"], "launcher": launcher,
        "script": next((word for word, file in SCRIPTS.items() if file == EXAMPLE / script), script),
    }  # fmt: skip
    if elastic := spec.get("elastic"):
        found["sizes"] = f"{elastic['minReplicas']}:{elastic['maxReplicas']}"
    return {key: str(value) for key, value in found.items()}


def play(player: Player, text: str, *, leave_out: bool = False) -> None:
    """Run a scenario; an error names its line. `leave_out`: what would disturb a job that has ended is left out, and
    is an error otherwise. `player.struck` and `player.left_out` tell which faults were which."""
    player.struck, player.left_out = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        try:
            _step(player, words, leave_out)
        except ScenarioError as e:
            raise ScenarioError(f"line {number}: {line}\n{e}") from e


def _step(player: Player, words: list[str], leave_out: bool) -> None:
    match words:
        case ["maybe", *rest]:
            _maybe(player, rest, leave_out)
        case ["job", *sizes]:
            player.ask_for(Asked.parse(sizes))
        case ["until", *what]:
            _until(player, what)
        case ["expect", *what]:
            _expect(player, what)
        case [verb, *_] if verb in (*FAULTS, "resume") and (over := player.over):
            if not leave_out:
                raise ScenarioError(f"there is nothing to disturb any more, the job is {over}: give it more steps")
            player.left_out.append(f"{shlex.join(words)}: the job is {over}")
        case [verb, *_] if verb in FAULTS:
            _do(player, words)
            player.struck.append(shlex.join(words))
        case _:
            _do(player, words)


def _maybe(player: Player, words: list[str], leave_out: bool) -> None:
    """What cannot be done now, because what it is done to is not there, is left out."""
    try:
        _step(player, words, leave_out)
    except ScenarioError as e:
        player.left_out.append(f"{shlex.join(words)}: {str(e).splitlines()[0]}")


def _until(player: Player, what: list[str]) -> None:
    match what:
        case ["step", step]:
            player.until_step(int(step))
        case ["further", steps]:
            player.until_further(int(steps))
        case ["committed", step]:
            player.until_step(int(step), "checkpoint.lastCommittedStep")
        case ["training"]:
            player.until_training()
        case ["spares"]:
            player.until_spares()
        case ["lost"]:
            player.until_lost()
        case ["recovered"]:
            player.until_recovered()
        case ["apart"]:
            player.until_apart()
        case ["no-pods"]:
            player.wait("no pods", lambda: not player.nodes_of_pods())
        case ["complete"]:
            player.until_complete()
        case _:
            raise ScenarioError(f"unknown: until {shlex.join(what)}")


def _expect(player: Player, what: list[str]) -> None:
    match what:
        case ["undisturbed"]:
            player.expect_undisturbed()
        case ["samples"]:
            player.expect_samples()
        case ["running"]:
            if player.over:
                raise ScenarioError(f"the job has ended before this line: {player.over}; give it more steps")
        case ["kept"]:
            player.expect_kept()
        case ["outcome"]:
            player.expect_outcome()
        case ["spread", most]:
            player.expect_spread(int(most))
        case ["restarts", count]:
            kind, number = count.split("=")
            player.expect_restarts(kind, int(number))
        case ["cause", cause]:
            player.expect_cause(cause)
        case ["rung", rung]:
            player.expect_rung(rung)
        case ["repeated", steps]:
            player.expect_repeated(int(steps))
        case _:
            raise ScenarioError(f"unknown: expect {shlex.join(what)}")


def _do(player: Player, words: list[str]) -> None:
    match words:
        case [("suspend" | "resume") as verb]:
            player.said = player.newest_step() if verb == "suspend" else player.said
            player.suspend(verb == "suspend")
        case ["scale", replicas]:
            player.sizes_seen.add(int(replicas))
            player.scale(int(replicas))
        case ["wait", seconds]:
            time.sleep(float(seconds))  # the next line comes at any moment
        case ["lose-processes", count]:
            player.lose_processes(int(count))
        case ["delete-pod", *which]:
            player.delete_pods(_which(player, which))
        case [("kill-process" | "kill-torchrun") as verb, *which]:
            for index in _which(player, which):
                getattr(player, verb.replace("-", "_"))(index)
        case ["kill-node-of", index]:
            player.kill_node_of(int(index))
        case ["drain-node-of", index]:
            player.drain_node(player.node_of(int(index)))
        case ["quota", pods]:
            player.set_quota(int(pods))
        case ["no-quota"]:
            player.set_quota(None)
        case [("kill-node" | "pause-node" | "drain-node" | "flap-node") as verb, number]:
            getattr(player, verb.replace("-", "_"))(player.node_names()[int(number) - 1])
        case [("kill-operator" | "restart-store" | "start-nodes") as verb]:
            getattr(player, verb.replace("-", "_"))()
        case _:
            raise ScenarioError(f"unknown line: {shlex.join(words)}")


def _which(player: Player, words: list[str]) -> list[int]:
    if words == ["member"]:
        waiting = player.status()["spares"]["workers"]
        return [next(index for index in range(player.workers + 1) if index not in waiting)]
    return player.indices() if words == ["all"] else [int(word) for word in words]
