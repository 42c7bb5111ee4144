"""What a dying process leaves behind, read by the operator's own reader: a real process, a real file."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep.contract import env, termination
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.conditions import Cause
from everstep_operator.plan.snapshot import Exit, PodPhase, WorkerPod
from everstep_operator.plan.state.losses import Loss, ScriptRefusal, losses_among

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A termination log as the kubelet makes it: an empty file that is there."""
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setattr(termination, "LOG", str(path))
    monkeypatch.setenv(env.JOB_UID, "uid-1")
    return path


def dies(log: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in a process that records what ends it."""
    begin = f"from everstep.contract import termination; termination.LOG = {str(log)!r}; termination.install()\n"
    return subprocess.run(
        [sys.executable, "-c", begin + script], check=False, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def judged() -> Callable[[str], Loss]:
    """What the operator makes of a worker whose torchrun ended with exit code 1 and left this message."""

    def call(message: str) -> Loss:
        ended = Exit(1, "Error", message, NOW)
        pod = WorkerPod("digits-w0-0", "u0", 0, 0, 1, PodPhase.FAILED, node="n1", created_at=NOW, exit=ended)
        (loss,) = losses_among(plan_world.World().snapshot(), {0: pod}, {0: True})
        return loss

    return call


def test_uncaught_exception_reaches_the_operator_with_its_text(log: Path, judged: Callable[[str], Loss]) -> None:
    done = dies(log, "raise ValueError('dataset is empty')")
    assert done.returncode == 1
    assert "ValueError: dataset is empty" in done.stderr  # Python's own report still comes
    loss = judged(log.read_text())
    assert (loss.cause, loss.exit_code) == (Cause.ERROR, 1)
    assert "ValueError: dataset is empty" in loss.detail


def test_fenced_process_is_known_by_its_own_exit_code(log: Path, judged: Callable[[str], Loss]) -> None:
    dies(log, "class Fenced(Exception): exit_code = 84\nraise Fenced('record 7: a newer writer')")
    loss = judged(log.read_text())
    assert (loss.cause, loss.exit_code) == (Cause.FENCED, 84)


def test_credentials_are_hidden_and_length_is_bounded(log: Path) -> None:
    secret = "s3cr3t" * 3
    error = RuntimeError(f"password={secret} " + "x" * 10_000)
    termination.write_error(error)
    text = log.read_text()
    assert secret not in text
    assert "password=[redacted]" in text
    assert len(text) < 4096
    assert len(json.loads(text)["error"]) == termination.MAX_ERROR


def test_a_long_refusal_is_told_whole_and_several_records_fit_the_kubelets_bound(
    log: Path, judged: Callable[[str], Loss]
) -> None:
    line = "write run.track(model=model)"
    try:
        raise RuntimeError("because " * 80 + line)
    except RuntimeError as e:
        termination.write_error(e)
    said = log.read_text()
    assert json.loads(said)["error"].endswith(line)
    assert judged(said).detail.endswith(line)
    log.write_text("")
    termination.write("e" * 5000, 1, ["l" * 500] * 50)
    assert 2 * len(log.read_bytes()) < 4096


def test_several_processes_of_a_pod_leave_a_line_each(log: Path) -> None:
    for rank in ("0", "1"):
        termination.write("Error: first", 1, [], environ={env.JOB_UID: "u", "RANK": rank})
    assert [json.loads(line)["rank"] for line in log.read_text().splitlines()] == ["0", "1"]


def test_outside_a_job_or_a_container_nothing_is_written(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = log.with_name("missing")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(termination, "LOG", str(missing))
        termination.write("Error: x", 1, [])
    monkeypatch.delenv(env.JOB_UID)
    termination.write("Error: x", 1, [])
    assert not missing.exists()
    assert log.read_text() == ""


def test_interrupt_by_a_person_is_no_error(log: Path) -> None:
    dies(log, "raise KeyboardInterrupt")
    assert log.read_text() == ""


def test_record_goes_where_the_kubelet_says(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    monkeypatch.setenv(env.TERMINATION_LOG, str(elsewhere))
    dies(log, "raise ValueError('boom')")
    assert "ValueError: boom" in elsewhere.read_text()
    assert log.read_text() == ""


def test_refusal_reaches_the_operator_with_the_line_of_the_script(
    tmp_path: Path, log: Path, judged: Callable[[str], Loss]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from concurrent.futures import Future\n"
        "from everstep.recovery.errors import LoopError\n"
        "from everstep.contract import refusal\n"
        "refusal.count_step(); refusal.count_step()\n"
        "refused = Future()\n"
        "refused.set_exception(LoopError('write this'))\n"
        "refused.result()  # raised in a file of Python's own\n"
    )
    dies(log, f"import runpy; runpy.run_path({str(script)!r})")
    assert json.loads(log.read_text())["refused_after"] == 2
    loss = judged(log.read_text())
    assert (loss.detail, loss.refusal) == ("LoopError: write this", ScriptRefusal("train.py:7"))


def test_other_error_is_no_refusal(log: Path, judged: Callable[[str], Loss]) -> None:
    dies(log, "raise ValueError('dataset is empty')")
    assert not {"refused_after", "line"} & set(json.loads(log.read_text()))
    assert judged(log.read_text()).refusal is None
