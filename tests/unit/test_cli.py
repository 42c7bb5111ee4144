"""The command line as a person meets it: one line for what is wrong, never a traceback, whatever the input."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from everstep.cli import profile
from everstep.cli.jobs import commands, tables
from everstep.installing import remedy
from everstep.jobs.history import ActionTaken, EventSeen, History, StatusSeen
from everstep.jobs.source import JobError
from everstep.jobs.view import EventRow, View, WorkerRow
from everstep_local.run import control
from everstep_local.run.console import Plain

GLOO = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Sockets lie below it, and the path of a socket has at most 107 bytes: pytest's own may be longer."""
    with tempfile.TemporaryDirectory(prefix="cli-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def everstep(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    return subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", *arguments],
        check=False,
        cwd=folder,
        env={**clean, "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=110,
    )


def job(name: str = "digits", **spec: object) -> str:
    fields = "".join(f"\n  {k}: {v}" for k, v in spec.items())
    return f"""apiVersion: everstep.dev/v1alpha1
kind: TrainingJob
metadata: {{name: {name}}}
spec:{fields}
  template: {{spec: {{containers: [{{name: worker, image: x, command: [torchrun, t.py]}}]}}}}
"""


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{c}: &{c} [{','.join(f'*{b}' for _ in range(10))}]\n" for b, c in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.long_but("content6-not YAML", "content7-spec.surprise: no such field")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (job(replicas=0), "spec.replicas"),
        (job(replicas="two"), "spec.replicas"),
        (job(replicas=1, rendezvous="{backend: etcd}"), "spec.rendezvous"),
        (job("a/b", replicas=1), "metadata.name: 'a/b' is not a name"),
        (job("../../x", replicas=1), "metadata.name: '../../x' is not a name"),
        (job("x" * 300, replicas=1), "metadata.name"),
        (job("2020-13-45", replicas=1), "not YAML"),
        (job(surprise=1, replicas=1), "spec.surprise: no such field"),
        (
            job(replicas=1).replace("image: x", "imge: x"),
            "spec.template.spec.containers[0].imge: no such field; is image",
        ),
        (job(replicas=1) + "  replicas: 2\n", "'replicas' is given already in line 5"),
        (job(replicas=1) + "---\n" + job("other", replicas=1), "2 documents of kind TrainingJob"),
        ("kind: TrainingJob\nmetadata: {name: x}\n" + BOMB, "more than 100000 values"),
        ("apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: x}\nspec: 3\n", "spec"),
        ("\x00", "not YAML"),
    ],
)
def test_job_that_cannot_run_is_refused_in_words_and_leaves_nothing(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(content)
    done = everstep(tmp_path, "run", "job.yaml", "--plain")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert list(tmp_path.glob("everstep-*/*")) == []
    assert [p for p in tmp_path.glob("everstep-*") if p.name != f"everstep-{os.getuid()}"] == []


@pytest.mark.long_but("arguments0", "arguments4")
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "missing.yaml"),
        ("run", "job.yaml", "--out", "job.yaml"),
        ("run", "job.yaml", "--at", "nonsense"),
        ("run", "job.yaml", "--secret", "x=missing"),
        ("status",),
        ("kill", "w0"),
        ("kill",),
        ("scale", "3"),
        ("logs", "w0"),
    ],
)
def test_command_that_cannot_be_done_says_so_in_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(job(replicas=1))
    done = everstep(tmp_path, *arguments)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.startswith("everstep: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_script_that_fails_is_told_with_its_own_words_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('the data set is empty')\n")
    (tmp_path / "job.yaml").write_text(job(replicas=1, recovery="{maxRestarts: 0}").replace("t.py", "train.py"))
    done = everstep(tmp_path, "run", "job.yaml", "--plain", "--out", "out", PYTHONIOENCODING="ascii")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: the data set is empty" in done.stdout
    assert "failed; timeline and logs in out" in done.stdout


@pytest.mark.long_but("everstep-everstep-run-can't open file '{folder}/t.py': No such file or directory")
@pytest.mark.parametrize(
    ("backend", "launcher", "words"),
    [
        ("c10d", "torchrun", "can't open file '{folder}/t.py': [Errno 2] No such file or directory"),
        ("everstep", "everstep-run", "can't open file '{folder}/t.py': No such file or directory"),
    ],
)
def test_script_that_is_not_there_ends_the_job_after_few_tries_in_its_words(
    backend: str, launcher: str, words: str, tmp_path: Path
) -> None:
    text = job(replicas=1, rendezvous=f"{{backend: {backend}}}", recovery="{noProgressLimit: 2}")
    (tmp_path / "job.yaml").write_text(text.replace("torchrun", launcher))
    done = everstep(tmp_path, "run", "job.yaml", "--plain", "--out", "out")
    assert done.returncode == 1, done.stdout + done.stderr
    said = words.format(folder=tmp_path)
    failure = json.loads((tmp_path / "out" / "status.json").read_text())["raw_status"]["failure"]
    assert failure["message"].startswith("CannotStart: worker 0: ")
    assert failure["message"].endswith(
        f"{said}; 2 tries ended like this, and the program has never run (spec.recovery.noProgressLimit)"
    )
    last_lines = failure["message"].split(": ", 2)[2].split("; 2 tries ended", 1)[0]
    # The line of the timeline is cut to the screen's width.
    assert f"WorkerLost: worker 0 on node-1 lost (Error): {last_lines}"[:120] in done.stdout


def view(message: str) -> View:
    rows = (WorkerRow(0, "j-w0-0", "node-1", "training", 0, 5, 0, 77),)
    events = (EventRow("2026-11-30T12:00:00Z", "Warning", "JobFailed", message),)
    return View("j", "Failed", message, 1, 1, 5, 9, None, 0, "", rows, events, {})


@pytest.mark.parametrize("message", [GLOO, "[bold]not bold[/bold]", "[/]", "a [x] b"])
def test_message_that_looks_like_markup_is_shown_as_it_is(message: str) -> None:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(tables.job(view(message)))
    assert console.export_text().count(message) == 2


def test_head_of_a_run_says_that_its_program_was_rehearsed() -> None:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(tables.job(view("")))
    assert "rehearsed" not in console.export_text()
    console.print(tables.job(replace(view(""), rehearsed="2026-11-29, 3 ranks, 40 steps")))
    assert "goodput –  rehearsed (2026-11-29, 3 ranks, 40 steps)" in console.export_text()


def test_plain_lines_tell_why_a_job_waits_and_only_when_that_changes() -> None:
    history = History(
        [
            StatusSeen(0.1, "WaitingForQuorum", "1/64 ready", 1, 64),
            StatusSeen(0.2, "WaitingForQuorum", "2/64 ready", 1, 64),
            StatusSeen(0.3, "WaitingForQuorum", "16/64 ready: worker 16 cannot be scheduled: too many pods", 1, 64),
            ActionTaken(0.4, "scale to 16"),
            EventSeen(0.5, "Normal", "WorldFormed", GLOO),
        ]
    )
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    lines = Plain(console, history)
    lines.update()
    lines.update()
    assert console.export_text().splitlines() == [
        "    0.1s  status WaitingForQuorum: 1/64 ready",
        "    0.3s  status WaitingForQuorum: 16/64 ready: worker 16 cannot be scheduled: too many pods",
        "    0.4s  > scale to 16",
        f"    0.5s  WorldFormed: {GLOO}",
    ]


async def test_run_that_stands_still_is_told_after_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(control, "STATUS_SECONDS", 0.1)

    async def never(_: object) -> object:
        await asyncio.Event().wait()
        yield {}

    def ask() -> list[object]:
        return list(control.ask(control.alive()[0], "status"))

    async with control.ControlServer("job", {"status": never}):  # type: ignore[dict-item]
        with pytest.raises(control.ControlError, match="does not answer; is it stopped"):
            await asyncio.to_thread(ask)


async def test_of_several_runs_the_one_that_is_meant_has_to_be_named_and_each_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    changed: list[str] = []

    def handlers(number: str) -> dict[str, control.Handler]:
        async def status(_: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            yield {"view": View.unknown("train").to_json()}

        async def suspend(_: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            changed.append(number)
            yield {"done": "suspend"}

        return {"status": status, "suspend": suspend}

    async def call(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, commands.app, arguments)

    async with control.ControlServer("train", handlers("first")):
        assert (await call("suspend", "--no-wait")).output == "train: to be suspended (local run train)\n"
        async with control.ControlServer("train", handlers("second")) as second:
            assert second.name == "train-2"
            refused = await call("suspend", "--no-wait")
            assert isinstance(refused.exception, JobError)
            assert str(refused.exception) == "several local runs are alive: train, train-2. Name the one that is meant"
            assert (await call("suspend", "train-2", "--no-wait")).exit_code == 0
            assert (await call("list", "-o", "name")).output == "train\ntrain-2\n"
            unknown = await call("suspend", "other", "--no-wait")
            assert str(unknown.exception).startswith("no local run named 'other'; alive: train, train-2")
    assert changed == ["first", "second"]


def test_worker_library_alone_has_ckpt_and_names_what_run_needs(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('msgspec', 'kubernetes', 'aiohttp', 'prometheus_client', 'celpy'): sys.modules[name] = None\n"
        "sys.argv = ['everstep', *sys.argv[1:]]\n"
        "from everstep.cli.main import main\n"
        "main()\n"
    )

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    helped = call("ckpt", "--help")
    assert (helped.returncode, "verify" in helped.stdout) == (0, True)
    refused = call("run", "job.yaml", "--workers", "3")
    assert refused.returncode == 2
    remedied = re.escape(remedy("everstep-local"))
    assert re.fullmatch(rf"everstep: the package [\w.]+ is missing: {remedied}\n", refused.stderr)


def test_folder_too_long_for_a_socket_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(job(replicas=1))
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    done = everstep(tmp_path, "run", "job.yaml", "--plain", TMPDIR=str(deep))
    assert done.returncode == 2
    assert done.stderr.startswith("everstep: ")
    assert "too long for a socket; set XDG_RUNTIME_DIR to a shorter folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_profile_of_processes_that_have_ended_shows_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    profile._show([{"rank": 0, "pod": "digits-w0-0", "pid": 71, "error": "the process ended"}])
    assert capsys.readouterr().out == "rank 0, pod digits-w0-0, pid 71: the process ended\n"
