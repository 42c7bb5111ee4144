"""Every word that the operator documents is one that it says: people wait for words that no path produces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.contract import exit_codes
from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.conditions import Cause, ConditionType, ReadyReason, Rung
from everstep_operator.api.events import EventReason
from everstep_operator.plan.snapshot import Exit, PodPhase, WorkerPod
from everstep_operator.plan.state.facts import derive
from everstep_operator.plan.state.losses import losses_among

FOLDER = Path(__file__).with_name("transcripts")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def worlds() -> list[tuple[str, set[str], set[str]]]:
    """Of every transcript: what it printed, and every condition type and rung that its status ever held."""
    found = []
    for path in sorted(FOLDER.rglob("*.txt")):
        if path.parent.name not in ("transcripts", "elastic", "queue"):
            continue
        world = elastic_world.ElasticWorld() if path.parent.name != "transcripts" else plan_world.World()
        printed, types, rungs = [], set(), set()
        for line in commands(path.read_text()):
            printed.append(world.run(line))
            types |= {str(c.type) for c in world.status.conditions}
            rungs |= {r.rung for r in world.status.recoveries}
        found.append(("\n".join(printed), types, rungs))
    return found


def commands(text: str) -> Iterator[str]:
    for block in text.strip("\n").split("\n\n"):
        for line in block.split("\n----", 1)[0].splitlines():
            if line.strip() and not line.startswith("#"):
                yield line


def test_every_event_reason_of_ready_condition_and_rung_is_in_some_history(
    worlds: list[tuple[str, set[str], set[str]]],
) -> None:
    said = "\n".join(printed for printed, _, _ in worlds)
    assert set(re.findall(r"^event \w+ (\w+):", said, re.MULTILINE)) == set(EventReason)
    assert set(re.findall(r"^status (\w+) ", said, re.MULTILINE)) == set(ReadyReason)
    assert set().union(*(types for _, types, _ in worlds)) == set(ConditionType)
    assert set().union(*(rungs for _, _, rungs in worlds)) == set(Rung)


def pod(**fields: object) -> WorkerPod:
    given = {"phase": PodPhase.FAILED, "node": "n1", **fields}
    return WorkerPod("digits-w0-0", "u", 0, 0, None, **given)  # type: ignore[arg-type]


def test_every_cause_is_what_some_lost_worker_is_lost_by() -> None:
    now = plan_world.START
    exits = [
        Exit(1),
        Exit(137, "OOMKilled"),
        Exit(137),
        Exit(1, message="Connection closed by peer"),
        Exit(128, "StartError"),
        Exit(1, message="RendezvousTimeoutError"),
        Exit(exit_codes.PREEMPTED),
        Exit(exit_codes.FENCED),
        Exit(exit_codes.STORE_UNUSABLE),
        Exit(255, "Unknown"),
    ]
    lost = [pod(exit=one) for one in exits]
    lost += [
        pod(reason="Evicted"),
        pod(reason="OutOfcpu"),
        pod(reason="DeadlineExceeded"),
        pod(disruption="TaintManager"),
        pod(phase=PodPhase.RUNNING, deleted_at=now),
    ]
    world = plan_world.World()
    found = set()
    for one in lost:
        (loss,) = losses_among(world.snapshot(), {0: one}, {0: True})
        found.add(loss.cause)
    elastic = elastic_world.ElasticWorld()
    elastic.do_fixed()
    elastic.do_settle()
    elastic.do_fail("0", "1", "RendezvousTimeoutError")  # the other workers never ran
    found |= {loss.cause for loss in derive(elastic.snapshot()).lost}
    elastic.do_job("recovery.startTimeoutSeconds=60")
    elastic.do_advance("60")
    found |= {loss.cause for loss in derive(elastic.snapshot()).lost}
    assert found == set(Cause)


# Each of these names anything: an error, a version, a folder. What a variable contains has a name of its own.
VAGUE = frozenset(
    [
        "asked",
        "comes",
        "found",
        "gave",
        "heard",
        "held",
        "meet",
        "met",
        "one",
        "place",
        "places",
        "put_up",
        "said",
        "settle",
        "settled",
        "told",
        "torchs",
        "worth",
    ]
)
DOCUMENTED = "Found"  # public: what Checkpointer.list returns
FINISHED = [
    "agent",
    "checkpoint",
    "cli",
    "contract",
    "data",
    "instruments",
    "membership",
    "recovery",
    "reporting",
    "roles",
    "storage",
    "torch_private",
    "train/adapters",
    "train/coordination",
    "train/feeding",
    "train/guards",
]
FOLDERS = ["operator", "local", "sources", "horovod", *(f"worker/everstep/{package}" for package in FINISHED)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_has_a_word_with_many_meanings(folder: str) -> None:
    vague = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ClassDef(name=name):
                    pass
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    pass
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    pass
                case _:
                    continue
            if name.strip("_").lower() in VAGUE and name != DOCUMENTED:
                vague.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not vague, "name what it contains, in a word of the field"
