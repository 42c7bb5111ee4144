"""`everstep render`: the objects of a job's file, as the operator's own planner makes them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from everstep.cli.main import app
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.kube.resources import PODS, SERVICES, Resource
from everstep_operator.kube.wire import Pod, Service
from everstep_operator.runtime.clock import SystemClock
from support import ROOT

DIGITS = ROOT / "examples" / "digits" / "elastic.yaml"
# The kinds that a cluster in memory has.
KINDS: dict[str, Resource[Pod] | Resource[Service]] = {
    "Pod": PODS,
    "Service": SERVICES,
}


def render(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["render", *map(str, arguments)])


def edited(tmp_path: Path, **spec: Any) -> Path:
    job = yaml.safe_load(DIGITS.read_text("utf-8"))
    job["spec"] |= spec
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job), "utf-8")
    return path


def test_a_cluster_takes_all_that_is_printed_and_it_has_the_files_container() -> None:
    printed = render(DIGITS, "-n", "ml")
    assert printed.exit_code == 0, printed.output
    objects = list(yaml.safe_load_all(printed.stdout))
    assert [o["kind"] for o in objects] == ["Service", "NetworkPolicy", "Pod", "Pod", "Pod"]
    assert [o["metadata"]["name"] for o in objects[2:]] == [f"digits-elastic-w{i}-0" for i in range(3)]
    wanted = yaml.safe_load(DIGITS.read_text("utf-8"))["spec"]["template"]["spec"]["containers"][0]
    assert {o["spec"]["containers"][0]["image"] for o in objects[2:]} == {wanted["image"]}
    assert {tuple(o["spec"]["containers"][0]["command"]) for o in objects[2:]} == {tuple(wanted["command"])}

    async def create() -> None:
        client = MemoryCluster(SystemClock(), namespaces=("ml",)).client()
        for one in objects:
            if one["kind"] in KINDS:
                await client.create(KINDS[one["kind"]], "ml", one)

    asyncio.run(create())


def test_the_same_file_is_printed_alike_each_time() -> None:
    assert render(DIGITS).stdout == render(DIGITS).stdout


def test_json_is_a_list_that_kubectl_takes() -> None:
    printed = json.loads(render(DIGITS, "-o", "json").stdout)
    assert (printed["apiVersion"], printed["kind"], len(printed["items"])) == ("v1", "List", 5)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"replicas": 9}, "replicas"),  # more than maxReplicas
        ({"checkpoints": {}}, "checkpoints"),
        ({"replicas": "three"}, "replicas"),
        ({"suspend": True}, "the operator would create nothing"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused_with_the_field(tmp_path: Path, spec: dict[str, Any], text: str) -> None:
    refused = render(edited(tmp_path, **spec))
    assert refused.exit_code != 0
    assert text in str(refused.exception)


def test_a_script_and_an_unknown_format_are_refused_with_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert "everstep init" in str(render(script).exception)
    assert "yaml or json" in str(render(DIGITS, "-o", "xml").exception)
    assert "there is no such file" in str(render(tmp_path / "none.yaml").exception)
