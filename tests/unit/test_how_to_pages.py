"""What the how-to pages give to other programs: a health script for Argo CD, and a role for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime  # Argo CD runs scripts in Lua 5.1

from everstep.cli.jobs.cluster_check import OPTIONAL, RIGHTS
from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.conditions import ReadyReason
from support import ROOT

TRANSCRIPTS = ROOT / "tests/unit/transcripts"
HEALTHY = {"Running", "RunningDegraded", "Complete"}


def manifests(page: str) -> list[Any]:
    text = (ROOT / "docs" / page).read_text()
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def health(obj: dict[str, Any]) -> tuple[str, str]:
    """What the script says of an object: its status and message."""
    (script,) = manifests("how-to-gitops.md")[0]["data"].values()
    lua = LuaRuntime()
    lua.globals().obj = lua.table_from(obj, recursive=True)
    said = lua.execute(script)
    return said.status, said.message


def statuses() -> Iterator[dict[str, Any]]:
    """Each status that the planner wrote in a transcript, once for all that have the same conditions."""
    seen = set[str]()
    for path in sorted(TRANSCRIPTS.rglob("*.txt")):
        if path.parent.name not in ("transcripts", "elastic", "queue"):
            continue
        world = elastic_world.ElasticWorld() if path.parent.name != "transcripts" else plan_world.World()
        for block in path.read_text().strip("\n").split("\n\n"):
            for line in block.split("\n----", 1)[0].splitlines():
                if line.strip() and not line.startswith("#"):
                    world.run(line)
                    status = world.status.to_wire()
                    key = json.dumps([(c["type"], c["status"], c["reason"]) for c in status.get("conditions", ())])
                    if key not in seen:
                        seen.add(key)
                        yield status


def expected(conditions: dict[str, dict[str, str]]) -> str:
    if conditions["Failed"]["status"] == "True" or conditions["Stalled"]["status"] == "True":
        return "Degraded"
    reason = conditions["Ready"]["reason"]
    return "Suspended" if reason == "Suspended" else "Healthy" if reason in HEALTHY else "Progressing"


def test_argo_cd_shows_the_health_of_each_status_that_the_planner_writes() -> None:
    shown, attention = set[str](), set[str]()
    for status in statuses():
        if not status.get("conditions"):
            continue
        conditions = {c["type"]: c for c in status["conditions"]}
        generation = status.get("observedGeneration", 1)
        word, message = health({"metadata": {"generation": generation}, "status": status})
        assert word == expected(conditions), conditions
        assert message
        needs = conditions.get("NeedsAttention", {"status": "False"})
        if needs["status"] == "True":
            assert needs["message"] in message
            attention.add(word)
        shown.add(word)
        assert health({"metadata": {"generation": generation + 1}, "status": status})[0] == "Progressing"
    assert shown == {"Healthy", "Progressing", "Degraded", "Suspended"}
    assert attention == {"Healthy", "Degraded"}


def kstatus(conditions: list[dict[str, str]]) -> str:
    """As cli-utils' kstatus computes it for a kind that it does not know: the first of these conditions decides."""
    for condition in conditions:
        if condition["type"] == "Reconciling" and condition["status"] == "True":
            return "InProgress"
        if condition["type"] == "Stalled" and condition["status"] == "True":
            return "Failed"
    (ready,) = (c for c in conditions if c["type"] == "Ready")
    return "Current" if ready["status"] == "True" else "InProgress"


def test_flux_shows_each_status_as_the_page_says() -> None:
    seen = dict[str, set[str]]()
    for status in statuses():
        if conditions := status.get("conditions"):
            (reason,) = (c["reason"] for c in conditions if c["type"] == "Ready")
            seen.setdefault(reason, set()).add(kstatus(conditions))
    assert seen.keys() == set(ReadyReason)
    assert {reason for reason, words in seen.items() if "Current" in words} == HEALTHY
    assert {reason for reason, words in seen.items() if "Failed" in words} == {"Failed"}
    for reason in HEALTHY:  # also where a worker finds no node
        assert seen[reason] == {"Current"}
    assert seen["Suspended"] == {"InProgress"}


@pytest.mark.parametrize("status", [{}, {"status": {}}, {"status": {"conditions": []}}])
def test_argo_cd_waits_for_a_job_that_no_operator_has_seen(status: dict[str, Any]) -> None:
    assert health({"metadata": {"generation": 1}, **status}) == ("Progressing", "the operator has not seen it yet")


def test_role_for_people_allows_all_that_the_commands_do() -> None:
    (role,) = (one for one in manifests("how-to-multi-tenant.md") if one.get("kind") == "Role")
    allowed = {
        (verb, group, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    rights = (*RIGHTS, *OPTIONAL)
    needed = [(verb, group, f"{resource}/{sub}" if sub else resource) for verb, group, resource, sub in rights]
    assert not [one for one in needed if one not in allowed and ("*", *one[1:]) not in allowed]
