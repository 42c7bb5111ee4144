"""Which local run the commands mean, and what they do with one that is stopped, ends, or left damaged files."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from everstep.cli import stacks
from everstep.cli.agents import NoAgent
from everstep.cli.jobs import commands
from everstep.contract import agent_requests, env
from everstep.jobs.source import JobError
from everstep.jobs.view import View, WorkerRow
from everstep_local.run import control

COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The commands' own folder; the path of a socket is bounded, and pytest's own may be longer."""
    with tempfile.TemporaryDirectory(prefix="runs-", ignore_cleanup_errors=True) as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setenv("KUBECONFIG", f"{name}/none")
        monkeypatch.chdir(name)
        yield Path(name)


class Run:
    """What answers for a live run: it notes what it was told to kill."""

    def __init__(self, job: str, *workers: int, out: Path | None = None, uid: str = "") -> None:
        rows = tuple(WorkerRow(n, f"{job}-w{n}-0", "node-1", "training", n, 1, 0, 1) for n in workers)
        self.view = replace(View.unknown(job), workers=rows)
        self.out, self.uid = out, uid
        self.killed: list[str] = []

    def handlers(self) -> dict[str, control.Handler]:
        async def status(_: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            yield {"view": self.view.to_json(), "out": str(self.out) if self.out else None, "uid": self.uid}

        async def kill(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            self.killed.append(request["pod"])
            yield {"done": f"kill {request['pod']}"}

        async def logs(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            yield {"line": f"log of {request['pod']}"}

        return {"status": status, "kill": kill, "logs": logs}


async def call(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, commands.app, arguments)


@contextmanager
def stopped_run(folder: Path, name: str) -> Iterator[None]:
    """A run whose process is stopped: its socket takes connections, and nobody answers."""
    control.folder()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / f"everstep-{os.getuid()}" / f"1-{name}.sock"))
        listener.listen(16)
        yield


def leave(folder: Path, name: str, view: View | str) -> None:
    """What a run leaves below `.everstep`."""
    left = folder / ".everstep" / name
    left.mkdir(parents=True)
    (left / "status.json").write_text(view if isinstance(view, str) else json.dumps(view.to_json()))


async def test_pod_that_several_runs_have_is_refused_and_killed_in_none() -> None:
    first, second = Run("digits", 0, 1), Run("digits", 0, 1, 2)
    async with control.ControlServer("digits", first.handlers()):
        async with control.ControlServer("digits", second.handlers()):
            for command in ("kill", "logs"):
                refused = await call(command, "digits-w1-0")
                assert str(refused.exception) == (
                    "pod digits-w1-0 is one of several local runs: digits, digits-2. Name the run and its worker: "
                    f"everstep {command} digits 1"
                )
            assert first.killed == second.killed == []
            assert (await call("kill", "digits-w2-0")).output == "kill digits-w2-0 (local run digits-2)\n"
            assert (await call("kill", "digits-2", "1")).output == "kill digits-w1-0 (local run digits-2)\n"
            assert (first.killed, second.killed) == ([], ["digits-w2-0", "digits-w1-0"])
        assert (await call("kill", "digits-w1-0")).output == "kill digits-w1-0 (local run digits)\n"


async def test_migrate_returns_when_the_pod_has_left_or_with_the_reason_why_it_cannot() -> None:
    run = Run("digits", 0, 1)

    async def migrate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        rows = tuple(row for row in run.view.workers if row.pod != request["pod"])
        run.view = replace(run.view, workers=rows) if request["pod"] == "digits-w1-0" else run.view
        yield {"done": f"migrate {request['pod']}"}

    async with control.ControlServer("digits", {**run.handlers(), "migrate": migrate}):
        assert (await call("migrate", "digits", "1")).output == "digits: digits-w1-0 moved (local run digits)\n"
        run.view = replace(run.view, message="1/1 ready; worker 0 cannot be moved: its script does not use the session")
        refused = await call("migrate", "digits", "0")
        assert "cannot be moved: its script does not use the session" in str(refused.exception)
        assert str((await call("migrate")).exception) == "give the job and its worker: everstep migrate JOB WORKER"


async def test_pod_of_the_second_run_is_found_when_the_first_has_ended() -> None:
    first, second = Run("digits", 1), Run("digits", 1)
    async with control.ControlServer("digits", first.handlers()):
        server = control.ControlServer("digits", second.handlers())
        await server.__aenter__()
    try:
        assert (await call("kill", "digits-w1-0")).output == "kill digits-w1-0 (local run digits-2)\n"
    finally:
        await server.__aexit__(None, None, None)


@asynccontextmanager
async def agent(job: str, uid: str, step: int) -> AsyncIterator[None]:
    """What answers for an agent with one process."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        if request.get("job") in (None, job, uid):
            known = {"rank": 0, "pid": 7, "pod": f"{job}-w0-0"}
            for answer in ({"job": job, "answers": [known]}, {**known, "step": step, "stacks": "File x"}):
                writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async with await asyncio.start_unix_server(serve, agent_requests.new_address((job, uid))):
        yield


async def steps(*arguments: str) -> list[int]:
    """At which steps the ranks are that `everstep stacks` shows."""
    done = await asyncio.to_thread(CliRunner().invoke, stacks.app, [*arguments, "-o", "json"])
    if done.exception is not None:
        raise done.exception
    return [answer["step"] for answer in json.loads(done.output)]


async def test_stacks_are_those_of_the_run_that_is_meant_though_another_is_of_the_same_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, uids = f"digits-{secrets.token_hex(4)}", [secrets.token_hex(8) for _ in range(2)]
    first = control.ControlServer(job, Run(job, 0, uid=uids[0]).handlers())
    async with first, agent(job, uids[0], 10):
        assert await steps(job) == [10]
        second = control.ControlServer(job, Run(job, 0, uid=uids[1]).handlers())
        async with second, agent(job, uids[1], 20):
            assert await steps(job) == [10]
            assert await steps(f"{job}-2") == [20]
            with pytest.raises(NoAgent, match=rf"^several jobs run on this machine: .*{job}, {job}-2.* Name the one"):
                await steps()
            # In a pod of the second one, beside which the first is seen, as with hostNetwork.
            monkeypatch.setenv(env.JOB_NAME, job)
            monkeypatch.setenv(env.JOB_UID, uids[1])
            assert await steps(job) == await steps() == [20]
            monkeypatch.delenv(env.JOB_UID)


async def test_jobs_of_one_name_that_are_no_local_runs_are_not_mixed() -> None:
    job = f"digits-{secrets.token_hex(4)}"
    async with agent(job, "one", 10):
        assert await steps(job) == [10]
        async with agent(job, "two", 20):
            with pytest.raises(NoAgent, match=rf"^several jobs run on this machine: {job}, {job}\. Name"):
                await steps(job)


@pytest.mark.long
async def test_all_logs_are_followed_side_by_side_also_of_a_pod_that_comes_later() -> None:
    run, taken = Run("digits", 0, 1), Run("digits", 0, 1, 2)
    handlers = run.handlers()
    asked, comes = list[str](), asyncio.Event()

    async def logs(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        pod = request["pod"]
        asked.append(pod)
        if pod == "digits-w1-0" and asked.count(pod) == 1:
            raise control.ControlError("its container has not started")
        for number in range(2):
            yield {"line": f"line {number}"}
        if pod == "digits-w1-0":
            run.view = taken.view
            comes.set()
        await comes.wait()
        if pod == "digits-w2-0":
            run.view = replace(taken.view, raw_status=COMPLETE)

    async with control.ControlServer("digits", handlers | {"logs": logs}):
        shown = await call("logs", "digits", "--all", "-f")
    assert sorted(shown.output.splitlines()) == [
        f"digits-w{worker}-0 | line {number}" for worker in range(3) for number in range(2)
    ]


async def test_log_of_a_rank_is_that_of_its_worker() -> None:
    run = Run("digits", 0, 1)
    rows = [replace(row, rank=rank) for row, rank in zip(run.view.workers, (1, 0), strict=True)]
    run.view = replace(run.view, workers=tuple(rows))
    async with control.ControlServer("digits", run.handlers()):
        assert (await call("logs", "digits", "--rank", "1")).output == "log of digits-w0-0\n"
        refused = [
            str((await call("logs", "digits", *words)).exception)
            for words in (["--rank", "2"], ["--rank", "0", "--all"], ["1", "--failed"])
        ]
        run.view = replace(run.view, workers=tuple(replace(row, rank=None) for row in rows))
        refused.append(str((await call("logs", "digits", "--rank", "0")).exception))
    assert refused == [
        "digits has no rank 2; it has 0, 1",
        *["give one of: a worker or a pod, --failed, --all, --rank"] * 2,
        "the ranks of digits are not known, as on a cluster: `everstep stacks` shows each rank with its pod; or name a "
        "worker: 0, 1",
    ]


@pytest.mark.parametrize("name", ["w1", "7", "x-w1-2"])
async def test_run_whose_name_looks_like_a_worker_or_a_pod_is_meant_by_its_name(name: str) -> None:
    run = Run(name, 0, 1)
    async with control.ControlServer(name, run.handlers()):
        assert (await call("logs", name)).output == f"log of {name}-w0-0\n"
        refused = await call("kill", name)
        assert str(refused.exception).startswith("give one of: ")
        assert (await call("kill", name, "1")).exit_code == 0
        assert (await call("kill", f"{name}-w0-0")).exit_code == 0
    assert run.killed == [f"{name}-w1-0", f"{name}-w0-0"]


@pytest.mark.long
async def test_stopped_run_delays_no_command_about_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "STATUS_SECONDS", 600.0)  # whoever asks the stopped run never ends
    run = Run("digits", 0)
    with stopped_run(folder, "stuck"):
        async with control.ControlServer("digits", run.handlers()):
            assert (await call("kill", "digits", "0")).exit_code == 0
            assert (await call("kill", "digits-w0-0")).exit_code == 0
            several = await call("status")
            assert str(several.exception).startswith("several local runs are alive: digits, stuck.")
            monkeypatch.setattr(control, "STATUS_SECONDS", 3.0)
            listed = await call("list", "-o", "name")
            assert (listed.exit_code, listed.stdout) == (0, "digits\n")
            assert listed.stderr == "note: run stuck does not answer; is it stopped?\n"
        alone = await call("list")
        assert str(alone.exception) == "run stuck does not answer; is it stopped?"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"job": "digits"}', "null", '{"a": 1}'])
async def test_damaged_status_of_one_ended_run_hides_no_other(folder: Path, damage: str) -> None:
    leave(folder, "good", View.unknown("digits"))
    leave(folder, "bad", damage)
    shown = await call("status", "digits", "-o", "name")
    assert (shown.exit_code, shown.stdout) == (0, "digits\n")
    assert shown.stderr.startswith("note: .everstep/bad/status.json cannot be read: ")
    listed = await call("list", "--ended", "-o", "name")
    assert (listed.exit_code, listed.stdout) == (0, "digits\n")
    named = await call("status", "--out", ".everstep/bad")
    assert str(named.exception).startswith(".everstep/bad/status.json cannot be read: ")


async def watched_until_it_ends(run: Run, before: Callable[[], object] = lambda: None) -> Any:
    """What `status -w` says of a run that ends when it has been seen once, and after `before`."""
    asked = asyncio.Event()
    status = run.handlers()["status"]

    async def seen(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for answer in status(request):
            yield answer
        asked.set()

    async with control.ControlServer("digits", {"status": seen}):
        watching = asyncio.create_task(call("status", "digits", "-w"))
        await asyncio.wait_for(asked.wait(), 10)
        before()
    return await asyncio.wait_for(watching, 10)


async def test_status_that_is_watched_shows_the_end_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "POLL_SECONDS", 0.05)
    left = folder / "elsewhere"
    left.mkdir()
    run = Run("digits", 0, out=left)
    end = replace(run.view, status="Complete", raw_status=COMPLETE, workers=())
    done = await watched_until_it_ends(run, lambda: (left / "status.json").write_text(json.dumps(end.to_json())))
    assert (done.exit_code, done.exception) == (0, None)
    assert done.output.splitlines()[0].startswith("digits  Pending")
    assert any(line.startswith("digits  Complete") for line in done.output.splitlines())


async def test_run_that_ends_without_a_word_is_named_and_an_older_one_of_its_folder_is_not_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "POLL_SECONDS", 0.05)
    run = Run("digits", 0, out=folder)
    run.view = replace(run.view, began="2026-01-02T00:00:00+00:00")
    older = replace(run.view, began="2026-01-01T00:00:00+00:00", status="Complete", raw_status=COMPLETE)
    (folder / "status.json").write_text(json.dumps(older.to_json()))
    done = await watched_until_it_ends(run)
    assert isinstance(done.exception, JobError)
    assert str(done.exception) == f"run digits has ended, and left no status.json in {folder}: it was killed"


async def test_progress_bar_of_a_run_is_lines_that_lose_no_word(folder: Path) -> None:
    leave(folder, "good", View.unknown("digits"))
    (folder / ".everstep" / "good" / "logs").mkdir()
    lines = ["00:00:00 begin here", "00:00:01 epoch 1: 10%\repoch 1: 20%\r", "00:00:02 end here"]
    (folder / ".everstep" / "good" / "logs" / "digits-w0-0.log").write_text("".join(f"{line}\n" for line in lines))
    shown = await call("logs", "digits-w0-0")
    assert shown.output.splitlines() == ["begin here", "epoch 1: 10%", "epoch 1: 20%", "end here"]
    assert (await call("logs", "digits-w0-0", "--tail", "1")).output == "end here\n"
