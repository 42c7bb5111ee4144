"""Parts of `everstep run` that need no process: the job file, faults of a story, the way for a second terminal."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from everstep.contract import labels
from everstep.jobs.history import StepSeen
from everstep.jobs.view import View, WorkerRow
from everstep.storage import open_store
from everstep_local.run import control
from everstep_local.run.faults import Fault, FaultError, changes_world, due, parse, target
from everstep_local.run.job_file import (
    Overrides,
    Prepared,
    load,
    parse_elastic,
    read_secret,
    with_local_checkpoints,
    with_local_claims,
)
from everstep_local.run.manifest import JobFileError
from everstep_local.run.running import last_lines, no_node
from everstep_local.run.view import view as made_view
from everstep_operator.kube.wire import Pod, Unstructured

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"


# The job file.


def placed(path: Path, asked: Overrides, folder: Path) -> Prepared:
    return with_local_checkpoints(load(path, (), asked), asked, folder)


def test_volume_claim_becomes_a_folder_and_a_note_says_which(tmp_path: Path) -> None:
    job = with_local_claims(load(EXAMPLE.parent / "deepspeed" / "job.yaml", (), Overrides()), tmp_path / "claims")
    (note,) = job.notes
    assert f"volume claim checkpoints is not here: {tmp_path / 'claims' / 'checkpoints'} takes its place" in note


HEAD = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}}
JOB = """apiVersion: everstep.dev/v1alpha1
kind: TrainingJob
metadata: {{name: digits, {metadata}}}
spec:
  replicas: 2
  {spec}
  recovery: {{{recovery}}}
  template: {{{template} spec: {{containers: [{{name: worker, image: x, command: [torchrun, t.py], {container}}}]}}}}
"""


def load_with(folder: Path, **parts: str) -> Prepared:
    path = folder / "job.yaml"
    empty = dict.fromkeys(("metadata", "spec", "recovery", "template", "container"), "")
    path.write_text(JOB.format(**{**empty, **parts}))
    return load(path, (), Overrides())


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"spec": "surprise: 1"}, "spec.surprise: no such field"),
        ({"spec": "Replicas: 1"}, "spec.Replicas: no such field; is replicas meant?"),
        ({"recovery": "maxRestart: 3"}, "spec.recovery.maxRestart: no such field; is maxRestarts meant?"),
        (
            {"recovery": "rules: [{onExitCode: [3], action: Fail}]"},
            "spec.recovery.rules[0].onExitCode: no such field; is onExitCodes meant?",
        ),
        ({"metadata": "label: {a: b}"}, "metadata.label: no such field; is labels meant?"),
        ({"template": "sepc: {},"}, "spec.template.sepc: no such field; is spec meant?"),
        (
            {"container": "comand: [x]"},
            "spec.template.spec.containers[0].comand: no such field; is command meant?",
        ),
        (
            {"container": "resources: {limit: {cpu: 1}}"},
            "spec.template.spec.containers[0].resources.limit: no such field; is limits meant?",
        ),
    ],
)
def test_field_that_there_is_not_is_refused_with_its_path_and_the_nearest(
    parts: dict[str, str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(JobFileError) as refused:
        load_with(tmp_path, **parts)
    assert str(refused.value) == f"{tmp_path}/job.yaml: {problem}"


def test_all_unknown_fields_are_named_at_once_and_few_of_very_many(tmp_path: Path) -> None:
    with pytest.raises(JobFileError) as refused:
        load_with(tmp_path, spec="a1: 1", recovery="maxRestart: 3")
    assert str(refused.value).count("no such field") == 2
    with pytest.raises(JobFileError, match="and 90 more") as refused:
        load_with(tmp_path, recovery=", ".join(f"x{n}: 1" for n in range(100)))
    assert str(refused.value).count("no such field") == 10


def test_what_kubernetes_knows_and_what_is_free_to_choose_is_accepted(tmp_path: Path) -> None:
    container = (
        "env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}], "
        "resources: {limits: {nvidia.com/gpu: 1}}, securityContext: {capabilities: {drop: [ALL]}}"
    )
    template = "metadata: {labels: {app.kubernetes.io/name: x}, annotations: {free: text}},"
    job = load_with(tmp_path, container=container, template=template, metadata="labels: {team: a}")
    assert job.manifest["spec"]["template"]["metadata"]["labels"] == {"app.kubernetes.io/name": "x"}


@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("*.yaml")), ids=lambda p: p.name)
def test_example_has_no_field_that_there_is_not(path: Path) -> None:
    assert load(path, (), Overrides()).name


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("replicas: 3", "line 6: 'replicas' is given already in line 5; remove one of them"),
        (
            "elastic:\n    minReplicas: 1\n    minReplicas: 2",
            "line 8: 'minReplicas' is given already in line 7; remove",
        ),
    ],
)
def test_key_that_is_there_twice_is_refused_with_both_lines(spec: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=problem):
        load_with(tmp_path, spec=spec)


def test_merge_key_that_fills_in_a_default_is_no_repetition(tmp_path: Path) -> None:
    container = "env: [&a {name: A, value: '1'}, {<<: *a, name: B}]"
    found = load_with(tmp_path, container=container).manifest["spec"]["template"]["spec"]["containers"][0]["env"]
    assert found == [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]


def test_script_becomes_a_job_of_its_name_that_commits_to_the_folder(tmp_path: Path) -> None:
    script = tmp_path / "My_Train 2.py"
    script.touch()
    asked = Overrides(workers=3)
    job = with_local_checkpoints(load(script, ["--lr", "1"], asked), asked, tmp_path / "commits")
    spec = job.manifest["spec"]
    assert (job.name, spec["replicas"], job.workdir) == ("my-train-2", 3, tmp_path)
    assert spec["template"]["spec"]["containers"][0]["command"] == ["torchrun", script.name, "--lr", "1"]
    assert spec["checkpoint"]["url"] == f"file://{tmp_path}/commits"
    assert spec["template"]["spec"]["containers"][0]["env"] == [{"name": "EVERSTEP_CHECKPOINT_DEFAULT", "value": "1"}]


def test_url_that_is_asked_for_is_no_default(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    (container,) = load(script, (), Overrides(checkpoint="s3://b/r")).manifest["spec"]["template"]["spec"]["containers"]
    assert container["env"] == []


def test_script_that_is_asked_to_be_elastic_is_started_by_everstep_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    job = load(script, ["--lr", "1"], Overrides(workers=3, elastic=parse_elastic("2:4"))).manifest["spec"]
    assert job["template"]["spec"]["containers"][0]["command"] == ["everstep-run", "train.py", "--lr", "1"]
    assert (job["replicas"], job["elastic"]) == (3, {"minReplicas": 2, "maxReplicas": 4})
    assert job["rendezvous"] == {"backend": "everstep"}


def test_bounds_that_are_asked_for_replace_the_jobs_and_nothing_else(tmp_path: Path) -> None:
    file = yaml.safe_load((EXAMPLE / "elastic.yaml").read_text())["spec"]
    job = load(EXAMPLE / "elastic.yaml", (), Overrides(elastic=(1, 8))).manifest["spec"]
    assert job == file | {"elastic": {"minReplicas": 1, "maxReplicas": 8}}


@pytest.mark.parametrize("text", ["", "2", "2:", ":4", "a:4", "2:-4", "2:4:6", "²:4"])
def test_bounds_that_are_no_two_numbers_are_refused(text: str) -> None:
    with pytest.raises(JobFileError, match=r"--elastic .*: expected MIN:MAX"):
        parse_elastic(text)


def test_store_whose_secret_is_not_here_becomes_a_folder_and_that_is_said(tmp_path: Path) -> None:
    job = placed(EXAMPLE / "trainingjob.yaml", Overrides(), tmp_path)
    assert job.manifest["spec"]["checkpoint"] == {"url": f"file://{tmp_path}", "everySteps": 50, "keep": 3}
    assert job.notes == (
        f"Secret s3-credentials is not here (--secret s3-credentials=FILE gives it): commits go to {tmp_path}",
    )


def test_store_whose_secret_is_given_stays(tmp_path: Path) -> None:
    job = placed(EXAMPLE / "trainingjob.yaml", Overrides(secrets={"s3-credentials": {"A": "b"}}), tmp_path)
    assert job.manifest["spec"]["checkpoint"]["url"] == "s3://everstep/digits"
    assert job.manifest["spec"]["checkpoint"]["secretRef"] == {"name": "s3-credentials"}
    assert job.notes == ()


def test_folder_with_a_space_is_a_url_that_the_store_understands(tmp_path: Path) -> None:
    folder = tmp_path / "my 100% folder"
    url = placed(EXAMPLE / "trainingjob.yaml", Overrides(), folder).manifest["spec"]["checkpoint"]["url"]
    assert " " not in url
    open_store(url).put("x", b"y")
    assert (folder / "x").read_bytes() == b"y"


def test_store_that_is_asked_for_replaces_the_jobs(tmp_path: Path) -> None:
    job = placed(EXAMPLE / "trainingjob.yaml", Overrides(checkpoint="memory://x"), tmp_path)
    assert job.manifest["spec"]["checkpoint"]["url"] == "memory://x"
    assert "secretRef" not in job.manifest["spec"]["checkpoint"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("kind: Pod", "0 documents of kind TrainingJob, beside Pod"),
        ("kind: TrainingJob\n---\nkind: TrainingJob", "2 documents of kind TrainingJob"),
        ("kind: TrainingJob\n---\nkind: Secret", "1 documents of kind TrainingJob, beside Secret"),
        ("- 1", "0 documents of kind TrainingJob, beside list"),
        ("kind: TrainingJob\nmetadata: {name: x}", "apiVersion: 'None'; everstep.dev/v1alpha1 is expected"),
        ("kind: TrainingJob", "metadata: must be an object"),
        ("[" * 5000, "line 1: nested deeper than 64 levels"),
        ("a:\n" + "".join(" " * i + "b:\n" for i in range(1, 300)), "line 6[0-9]: nested deeper than 64 levels"),
        ('a:\n  b: "x\\ud800"', r"line 2: .*half of a character"),
        ("a: &a {x: 1}\nb:\n  <<: [" + "*a," * 200 + "*a]", "line 3: `<<` merges more than 100 mappings"),
    ],
)
def test_file_that_is_no_job_is_refused_by_its_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobFileError, match=f"job.yaml: .*{message}"):
        load(path, (), Overrides())


def test_missing_file_and_arguments_of_a_job_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="no such file"):
        load(tmp_path / "no.yaml", (), Overrides())
    with pytest.raises(JobFileError, match="arguments are for scripts"):
        load(EXAMPLE / "trainingjob.yaml", ("--lr",), Overrides())


def test_job_that_is_no_object_is_left_to_the_api_server(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**HEAD, "spec": "no"}))
    assert placed(path, Overrides(workers=2), tmp_path).manifest["spec"] == "no"


def test_secret_file_is_read_and_a_wrong_line_named(tmp_path: Path) -> None:
    path = tmp_path / "s.env"
    path.write_text("# comment\nAWS_KEY=a=b\n\nX = y \n")
    assert read_secret(path) == {"AWS_KEY": "a=b", "X": "y"}
    path.write_text("A=1\nnonsense\n")
    with pytest.raises(JobFileError, match=r"s\.env:2: expected NAME=value"):
        read_secret(path)


# View.


def test_head_of_the_status_is_not_behind_the_workers_below_it() -> None:
    """The operator writes the job's progress every few seconds; a worker's newest report is in its row at once."""
    job = msgspec.convert(
        {
            "metadata": {"name": "digits", "uid": "u"},
            "status": {
                "conditions": [{"type": "Ready", "reason": "Running"}],
                "progress": {"step": 40, "rehearsed": "r"},
            },
        },
        Unstructured,
    )
    pod = msgspec.convert(
        {
            "metadata": {
                "name": "digits-w0-0",
                "labels": {labels.JOB: "digits", labels.WORKER_INDEX: "0", labels.INCARNATION: "0"},
            },
            "spec": {"containers": [{"name": "worker"}]},
            "status": {"phase": "Running"},
        },
        Pod,
    )
    seen = StepSeen(1.0, "digits-w0-0", worker=0, rank=0, world_size=1, step=57)
    assert made_view(job, [pod], {"digits-w0-0": seen}, {}, [], {}).step == 57
    assert made_view(job, [pod], {}, {}, [], {}).step == 40
    assert made_view(job, [pod], {}, {}, [], {}).rehearsed == "r"


# Faults.


def view(step: int, round_: int = 1, status: str = "Running", workers: int = 2) -> View:
    rows = tuple(
        WorkerRow(i, f"j-w{i}-{round_ - 1}", "node-1", "training", i, step, round_ - 1, 1) for i in range(workers)
    )
    return View("j", status, "", round_, workers, step, None, None, 0, "", rows, (), {})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("120:kill=1", Fault(120, "kill", "1")),
        ("120:kill=all", Fault(120, "kill", "all")),
        ("0:delete=0", Fault(0, "delete", "0")),
        ("5:kill-node=node-2", Fault(5, "kill-node", "node-2")),
        ("7:scale=4", Fault(7, "scale", "4")),
        ("7:kill-operator", Fault(7, "kill-operator")),
        ("7:suspend", Fault(7, "suspend")),
    ],
)
def test_fault_is_read_from_its_text(text: str, fault: Fault) -> None:
    assert parse(text) == fault


@pytest.mark.parametrize(
    "text", ["", "kill=1", "x:kill=1", "5:kill", "5:scale=-1", "5:delete=all", "5:reboot", "5:kill=1 2"]
)
def test_text_that_is_no_fault_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(FaultError, match="expected STEP:ACTION"):
        parse(text)


def test_fault_waits_for_its_step_and_for_the_world_that_follows_the_one_before() -> None:
    story = (Fault(100, "kill", "1"),)
    assert due(story, view(99), 0) is None
    assert due(story, view(100), 0) == story[0]
    assert due(story, view(100, status="Recovering"), 0) is None
    assert due(story, view(100, round_=1), 1) is None
    assert due(story, view(100, round_=2), 1) == story[0]
    assert due((), view(100), 0) is None
    assert due(story, view(99, round_=0), 0) is None, "a job without rounds"
    assert due(story, view(100, round_=0), 0) == story[0]


def test_resume_waits_until_the_workers_are_gone() -> None:
    story = (Fault(0, "resume"),)
    assert due(story, view(5, status="Suspended"), 0) is None
    assert due(story, view(5, status="Suspended", workers=0), 0) == story[0]


def test_only_what_makes_a_new_round_is_waited_for() -> None:
    changing = {"kill=1": True, "scale=3": True, "scale=2": False, "kill-operator": False, "suspend": True}
    changing |= {"kill-node=node-1": True, "kill-node=node-2": False}
    assert {text: changes_world(parse(f"1:{text}"), view(1)) for text in changing} == changing


def test_target_is_the_workers_newest_pod() -> None:
    assert target(Fault(0, "kill", "1"), view(1, round_=3)) == "j-w1-2"
    assert target(Fault(0, "kill", "7"), view(1)) is None


# The second terminal.


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


async def count(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    if request.get("to", 0) > 9:
        raise control.ControlError("no more than nine")
    for number in range(request["to"]):
        yield {"number": number}


def sockets(runtime: Path) -> list[Path]:
    return list(runtime.rglob("*.sock"))


def asked(verb: str, **arguments: Any) -> list[dict[str, Any]]:
    return list(control.ask(control.alive()[0], verb, **arguments))


async def test_second_terminal_gets_every_answer(runtime: Path) -> None:
    async with control.ControlServer("job", {"count": count}):
        assert await asyncio.to_thread(asked, "count", to=3) == [{"number": n} for n in range(3)]
    assert sockets(runtime) == []


async def test_second_terminal_reads_the_runs_own_reason(runtime: Path) -> None:
    async with control.ControlServer("job", {"count": count}):
        with pytest.raises(control.ControlError, match="no more than nine"):
            await asyncio.to_thread(asked, "count", to=10)
        with pytest.raises(control.ControlError, match="unknown request; this run knows count"):
            await asyncio.to_thread(asked, "reboot")


async def test_answers_of_a_run_that_ends_meanwhile_end_too(runtime: Path) -> None:
    is_asked = asyncio.Event()

    async def endless(_: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"line": "first"}
        is_asked.set()
        await asyncio.Event().wait()

    async with control.ControlServer("job", {"logs": endless}):
        task = asyncio.create_task(asyncio.to_thread(asked, "logs"))
        await asyncio.wait_for(is_asked.wait(), 10)
    assert await asyncio.wait_for(task, 10) == [{"line": "first"}]


def test_socket_of_a_run_that_crashed_is_removed(runtime: Path) -> None:
    stale = control.folder() / "1-job.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    assert control.alive() == []
    assert not stale.exists()


def test_folder_that_others_may_open_is_refused(runtime: Path) -> None:
    folder = runtime / f"everstep-{os.getuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(control.ControlError, match="not a folder that only you can open"):
        control.folder()


# What the end of a run shows.


def test_farewell_of_a_torchrun_whose_store_is_gone_does_not_hide_the_last_words_of_the_program() -> None:
    said = ["step=300 loss=0.03 world=4", "samples=28800", "final step=300 loss=0.09"]
    farewell = [
        "[W1122 00:52:42.212000000 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3)",
        "Exception raised from recvBytes at torch/csrc/distributed/c10d/Utils.hpp:784 (most recent call first):",
        "<omitting python frames>",
        "frame #30: _start + 0x21 (0x5611c3839081 in python)",
        "",
        "W1122 00:52:42.212000 13488 torch/rendezvous.py:1298] The node has failed to shutdown the rendezvous",
    ]
    assert last_lines(said + farewell) == said
    assert last_lines(farewell) == []
    agent = ["10:42:11.640 everstep-run: round 4: closed: finished: all members' processes have succeeded"]
    assert last_lines(said + agent) == said


def test_run_with_one_node_says_how_to_have_several() -> None:
    assert no_node("node-2", 1) == (
        "no node 'node-2'; this run has one, node-1: begin it with --nodes 2 or more to lose one of several"
    )
    assert no_node("x", 3) == "no node 'x'; they are node-1 to node-3"
