"""The Python client's own parts: what it refuses, what it makes of a script or a function, and what it shows."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from everstep.cli.jobs import create
from everstep.client import (
    STATUSES,
    ClusterUnavailable,
    Event,
    InvalidRequest,
    Job,
    JobNotFound,
    Rows,
    TrainingClient,
    WaitTimeout,
)
from everstep.client import program as programs
from everstep.client.manifest import build
from everstep.jobs.view import View, WorkerRow
from everstep_operator.api.conditions import ReadyReason

OUTSIDE = 3


def whole(steps: int, *, text: str = "x") -> None:
    import json  # noqa: PLC0415

    total = 0

    def add(number: int) -> int:
        nonlocal total
        total += number
        return total

    for step in range(steps):
        add(step)
    print(
        json.dumps({"total": total, "text": text}),
        """two
  lines""",
    )


def uses_outside() -> None:
    print(OUTSIDE, Path())


@functools.cache
def decorated() -> None:
    print(1)


def wrap(function: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(function)
    def wrapper() -> None:
        function()

    return wrapper


@wrap
def wrapped() -> None:
    print(2)


def run(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_importing_the_client_loads_neither_torch_nor_the_official_client() -> None:
    heavy = ["torch", "numpy", "kubernetes", "rich", "typer", "yaml", "urllib3", "everstep_local", "everstep_operator"]
    code = (
        "import sys\n"
        "from everstep.client import TrainingClient\n"
        "TrainingClient(), TrainingClient(local=True)\n"
        f"print([each for each in {heavy} if each in sys.modules])"
    )
    assert run(code) == "[]\n"


def test_without_the_official_client_the_package_to_install_is_named(tmp_path: Path) -> None:
    (tmp_path / "kubernetes.py").write_text("raise ModuleNotFoundError('none', name='kubernetes')")
    code = (
        "from everstep.client import TrainingClient, ClusterUnavailable\n"
        "try: TrainingClient().list_jobs()\n"
        "except ClusterUnavailable as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.stdout == "the package kubernetes is missing: pip install 'everstep[cluster]'\n"


def test_a_function_is_sent_as_the_text_that_ran() -> None:
    program = programs.of(None, whole, {"steps": 4, "text": "it's"}, ())
    assert (program.name, program.main, program.arguments) == ("whole", "whole.py", ())
    assert run(program.files["whole.py"]) == '{"total": 6, "text": "it\'s"} two\n  lines\n'


def test_an_indented_function_keeps_its_strings() -> None:
    def inner() -> None:
        print("""a
        b""")

    (text,) = programs.of(None, inner, (), ()).files.values()
    assert run(text) == "a\n        b\n"


def enclosed(value: int) -> Callable[[], None]:
    def inner() -> None:
        print(value)

    return inner


def made_by_exec() -> Callable[[], None]:
    names: dict[str, Any] = {}
    exec("def unread(): print(1)", names)
    unread: Callable[[], None] = names["unread"]
    return unread


@pytest.mark.parametrize(
    ("function", "args", "text"),
    [
        (uses_outside, (), "it uses OUTSIDE, Path, which are outside it: import and define inside the function"),
        (enclosed(3), (), r"it uses value of the function around it: pass them by args=\{...\}"),
        (lambda: None, (), "a function that is written with def is expected"),
        (made_by_exec(), (), "its text cannot be read back"),
        (decorated, (), "a function that is written with def is expected"),
        (wrapped, (), "it uses function of the function around it"),
        (print, (), "a function that is written with def is expected"),
        (whole, {"step": 1}, r"args=\{'step': 1\} are not what whole takes: "),
        (whole, {"steps": object()}, r"args: <object .* is no literal"),
        (whole, "3", "a mapping of the function's arguments is expected"),
    ],
)
def test_a_function_that_cannot_be_sent_is_refused_with_what_to_do(function: Any, args: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        programs.of(None, function, args, ())


def test_a_function_whose_file_has_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "changing.py"
    file.write_text("def train():\n    print('first')\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert "first" in programs.of(None, names["train"], (), ()).files["train.py"]
    file.write_text("def train():\n    print('second')\n")
    os.utime(file, (1, 1))
    with pytest.raises(InvalidRequest, match="its text is not what was run: it has changed since"):
        programs.of(None, names["train"], (), ())


def test_scripts_and_files_have_bounds_and_names(tmp_path: Path) -> None:
    script, other = tmp_path / "train.py", tmp_path / "model.py"
    script.write_text("import model\n")
    other.write_text("x = 1\n")
    program = programs.of(script, None, ["--steps", 3], [other])
    assert (program.main, program.arguments, set(program.files)) == (
        "train.py",
        ("--steps", "3"),
        {"train.py", "model.py"},
    )
    for given, text in (
        ({"args": "--steps 3"}, "it is a list of words"),
        ({"files": [script]}, "train.py is there twice"),
        ({"files": [tmp_path / "none.py"]}, "none.py cannot be read: No such file"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            programs.of(script, None, given.get("args", ()), given.get("files", ()))  # type: ignore[arg-type, call-overload]
    with pytest.raises(InvalidRequest, match="give either script=FILE or function=FUNCTION"):
        programs.of(None, None, (), ())
    (tmp_path / "my model.py").write_text("")
    with pytest.raises(InvalidRequest, match=r"'my model.py': a file's name has letters"):
        programs.of(script, None, (), [tmp_path / "my model.py"])
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="no text in UTF-8: put it into an image"):
        programs.of(script, None, (), [tmp_path / "weights.bin"])
    other.write_text("#" * programs.MAX_BYTES)
    with pytest.raises(InvalidRequest, match="more than the 1048576 that can be sent"):
        programs.of(script, None, (), [other])
    other.write_text("#" * (programs.MAX_BYTES + 1))
    with pytest.raises(InvalidRequest, match="more than the 1048576 bytes that can be sent"):
        programs.of(script, None, (), [other])


ASKED: dict[str, Any] = {
    "local": False, "name": "train", "image": "i:1", "workers": 2, "elastic": None, "spares": 0, "env": {},
    "resources": {}, "checkpoint": None, "secret": None,
}  # fmt: skip


def test_the_job_is_that_of_init_but_for_its_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    program = programs.of(tmp_path / "train.py", None, ["--a", "b"], ())
    asked = {**ASKED, "elastic": (1, 4), "spares": 2, "resources": {"cpu": 1, "memory": "2Gi", "gpu": 4}}
    job, config_map = build(program, **{**asked, "checkpoint": "s3://b/train", "secret": "s3-credentials"})
    options = [
        "--print",
        "--image",
        "i:1",
        "--elastic",
        "1:4",
        "--spares",
        "2",
        "--gpus",
        "4",
        "--checkpoint",
        "s3://b/train",
    ]
    made = CliRunner().invoke(create.app, [str(tmp_path / "train.py"), *options, "--", "--a", "b"])
    expected = yaml.safe_load(made.output)
    (own,), (its,) = (each["spec"]["template"]["spec"].pop("containers") for each in (job, expected))
    assert own.pop("command") == ["everstep-run", "/opt/everstep/program/train.py", "--a", "b"]
    assert own.pop("volumeMounts") == [
        {"name": "everstep-program", "mountPath": "/opt/everstep/program", "readOnly": True}
    ]
    assert job["spec"]["template"]["spec"].pop("volumes") == [
        {"name": "everstep-program", "configMap": {"name": config_map}}
    ]
    its.pop("command"), its.pop("workingDir")
    its["resources"] = {kind: {k: str(v) for k, v in each.items()} for kind, each in its["resources"].items()}
    assert own == its
    assert job == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "Train"}, "name='Train': not a name of at most 48 lower-case letters"),
        ({"workers": 0}, "workers=0: the number of pods, at least 1"),
        ({"workers": True}, "workers=True: the number of pods"),
        ({"spares": 1}, r"spares=1 needs elastic=\(FEWEST, MOST\)"),
        ({"spares": -1, "elastic": (2, 2)}, "spares=-1: how many workers wait"),
        ({"elastic": 4}, "elastic=4: the fewest and the most workers"),
        ({"elastic": (3, 4)}, r"elastic=\(3, 4\): workers=2 has to be from the fewest to the most"),
        ({"env": {"A B": 1}}, "env: 'A B' is no name of a variable"),
        ({"env": {"A": None}}, "env: A has to be a text or a number"),
        ({"resources": {"gpus": 1}}, "resources: 'gpus' is none of cpu, memory and gpu"),
        ({"resources": {"gpu": 0.5}}, "gpu=0.5: a number of whole devices"),
        ({"secret": "s"}, "give checkpoint=URL, too"),
    ],
)
def test_what_cannot_be_a_job_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        build(programs.of(None, whole, {"steps": 1}, ()), **{**ASKED, **change})


def test_names_that_are_made_are_unlike_and_valid() -> None:
    program = programs.Program("3_" + "x" * 60, "f.py", (), {})
    jobs = [build(program, **{**ASKED, "name": None})[0]["metadata"]["name"] for _ in range(2)]
    assert jobs[0] != jobs[1]
    assert all(name.startswith("job-3-xxx") and len(name) <= 48 for name in jobs)


def test_the_statuses_are_the_operators() -> None:
    assert set(STATUSES) == {*map(str, ReadyReason), "Deleted"}
    with pytest.raises(InvalidRequest, match="status=Completed: a job's are Pending"):
        TrainingClient(local=True).wait_for_job_status("x", "Completed")


def test_what_is_shown_in_a_notebook_is_escaped_and_frozen() -> None:
    row = WorkerRow(0, "d-w0-0", "<i>", "training", None, 3, 0, None)
    view = View("d", "Running", "<script>1</script>", 1, 1, 3, None, None, 0, "", (row,), (), {})
    job = Job.of(view, "namespace <b>")
    shown = job._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "&lt;b&gt;" in shown
    assert "&lt;i&gt;" in shown
    assert "<script" not in shown
    assert Rows([Event("1", "Normal", "A", "<x>")])._repr_html_().count("<tr>") == 2
    assert Rows[Event]()._repr_html_() == "<p>none</p>"
    with pytest.raises(FrozenInstanceError):
        job.status = "x"  # type: ignore[misc]


def test_what_is_wrong_is_one_error_without_the_transports_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    local = TrainingClient(local=tmp_path / "runs")
    assert local.list_jobs() == ()
    with pytest.raises(JobNotFound, match=r"no local run named 'x', alive or below .*runs"):
        local.get_job("x")
    for name in ("", "../x", None):
        with pytest.raises(InvalidRequest, match="is no job's name"):
            local.delete_job(name)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="is no job's name"):
            TrainingClient(kubeconfig=tmp_path / "none").delete_job(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="leave them or local away"):
        TrainingClient(local=True, namespace="x")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterUnavailable, match="no cluster is configured") as caught:
        TrainingClient().list_jobs()
    assert caught.value.__suppress_context__
    assert issubclass(WaitTimeout, TimeoutError)
