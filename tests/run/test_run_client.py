"""The Python client on local runs, with real processes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.client import InvalidRequest, JobFailed, JobNotFound, TrainingClient, WaitTimeout
from support.scenarios.player import wait_for

pytestmark = pytest.mark.timeout(240)
SECONDS = 90.0


def counts(until: str) -> None:
    """A program without torch, which ends when this file is there."""
    import os  # noqa: PLC0415
    import time  # noqa: PLC0415

    number = 0
    while not os.path.exists(until):
        number += 1
        print(os.environ["GREETING"], number, flush=True)
        time.sleep(0.1)
    print("the end", flush=True)


def fails() -> None:
    raise SystemExit(7)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingClient]:
    with tempfile.TemporaryDirectory() as sockets:  # a socket's path has a limit
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        monkeypatch.chdir(tmp_path)
        made = TrainingClient(local=tmp_path / "runs")
        yield made
        for job in made.list_jobs():
            if not job.ended and job.place.startswith("local run"):
                made.delete_job(job.name)
        wait_for("no run is left", lambda: not any(job.place.startswith("local run") for job in made.list_jobs()), 60)


def refused(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_a_function_is_run_watched_changed_and_read_after_its_end(client: TrainingClient, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = client.train(
        function=counts, args={"until": str(gate)}, name="counts", workers=1, elastic=(1, 2),
        env={"GREETING": "hello", "EVERSTEP_PRELOAD": ""},
    )  # fmt: skip
    assert (job.name, job.ended) == ("counts", False)
    refused(lambda: client.train(function=fails, name="counts"), InvalidRequest, "a local run counts is alive")
    log = client.get_job_logs("counts", follow=True, timeout=SECONDS)
    assert next(line for line in log if line.startswith("hello")) == "hello 1"
    running = client.get_job("counts")
    assert [worker.worker for worker in running.workers] == [0]
    began = time.monotonic()
    refused(lambda: client.wait_for_job_status("counts", timeout=0.5), WaitTimeout, r"not within 0.5 s: .* goes on")
    assert time.monotonic() - began < 30
    refused(lambda: client.get_job_logs("counts", worker=5), InvalidRequest, "counts has no worker 5; it has 0")
    assert client.suspend("counts", timeout=SECONDS).workers == ()
    assert client.scale("counts", 2).name == "counts"
    client.resume("counts", timeout=0)
    # The log that is followed goes on with the pods that come after a suspension.
    assert next(line for line in log if line == "hello 1") == "hello 1"
    gate.touch()
    assert "the end" in list(log)
    done = client.wait_for_job_status("counts", timeout=SECONDS)
    assert (done.status, done.ended) == ("Complete", True)
    wait_for("the run's end", lambda: client.get_job("counts").place.startswith("ended, in "), 60)
    assert "the end" in client.get_job_logs("counts", worker=0)
    assert {"JobSuspended", "JobResumed", "JobCompleted"} <= {event.reason for event in client.get_job_events("counts")}
    assert client.checkpoints("counts") == ()
    assert [each.name for each in client.list_jobs()] == ["counts"]
    refused(lambda: client.scale("counts", 1), InvalidRequest, "this run has ended")
    refused(lambda: client.get_job("other"), JobNotFound, "no local run named 'other'")
    assert "counts" in client.list_jobs()._repr_html_()


@pytest.mark.long
def test_a_job_that_fails_or_is_refused_says_why(client: TrainingClient, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1], flush=True); sys.exit(7)\n")
    job = client.create_job(
        {
            "apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "fails"},
            "spec": {
                "replicas": 1, "recovery": {"maxRestarts": 0},
                "template": {"spec": {"containers": [
                    {"name": "worker", "image": "x", "command": ["python", str(tmp_path / "train.py"), "word"]},
                ]}},
            },
        }
    )  # fmt: skip
    refused(lambda: client.wait_for_job_status(job.name, timeout=SECONDS), JobFailed, "fails has ended: Failed: ")
    assert client.wait_for_job_status(job.name, {"Failed", "Complete"}, timeout=1).status == "Failed"
    assert list(client.get_job_logs(job.name)) == ["word"]
    refused(lambda: client.checkpoints(job.name), InvalidRequest, "no spec.checkpoint.url")
    unknown = {"metadata": {"name": "unknown"}, "kind": "TrainingJob", "apiVersion": "everstep.dev/v1alpha1", "spec": 3}
    refused(lambda: client.create_job(unknown), InvalidRequest, "spec")
    assert os.environ.get("GREETING") is None
