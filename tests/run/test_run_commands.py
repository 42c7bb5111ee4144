"""The commands of a second terminal, on a local run that is alive and on what it left."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from everstep.jobs.source import JobError
from support.commands import caller
from support.local.local_job import LocalJob
from support.scenarios.player import wait_for
from support.scenarios.reference import EXAMPLE

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


def test_live_run_is_watched_and_changed_and_its_end_is_read_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = LocalJob(tmp_path / "run", name="elastic")
    monkeypatch.chdir(job.folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(job.temporary))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    call = caller()
    out = job.folder / ".everstep" / "kept"
    job.start(
        str(EXAMPLE / "elastic.py"), "--workers", "3", "--elastic", "2:4", "--plain", "--out", str(out),
        "--", "--steps", "100000", "--step-seconds", "0.02",
    )  # fmt: skip
    try:
        wait_for(
            "three workers that train", lambda: job.view().get("size") == 3 and job.reached("progress.step") > 0, 90
        )
        assert call("list", "-o", "name") == "elastic\n"
        (listed,) = json.loads(call("list", "-o", "json"))
        assert (listed["ready"], listed["wanted"]) == (3, 3)
        assert "workers" not in listed, "a summary does not know them"
        assert call("list").splitlines()[1].split()[4] == "3/3"
        shown = json.loads(call("status", "elastic", "-o", "json"))
        assert [(row["worker"], row["state"]) for row in shown["workers"]] == [(n, "training") for n in range(3)]
        assert [row["rank"] for row in shown["workers"] if row["step"] is not None] == [0], "no other reports its steps"
        kept = json.loads(call("events", "elastic", "-o", "json"))
        assert datetime.fromisoformat(shown["events"][0]["at"]).tzinfo is not None
        assert kept[0] == shown["events"][0], "one event has one time, whichever command prints it"
        wait_for("a line of the script", lambda: "\nstep=" in call("logs", "0"), 60)  # the only run is meant
        assert len(call("logs", "elastic", "w0", "--tail", "1").splitlines()) == 1
        assert call("kill", "elastic", "1") == "kill elastic-w1-0 (local run elastic)\n"
        wait_for(
            "the worker that replaces it",
            lambda: job.worker(1)["incarnation"] == 1 and job.worker(1)["state"] == "training",
            60,
        )
        assert call("logs", "elastic-w1-0").count("step=") == 0, (
            "rank 0 alone prints; the log of a pod that is gone is kept"
        )
        with pytest.raises(JobError, match=r"^elastic can have 2 to 4 workers, not 9: spec\.elastic"):
            call("scale", "9")
        assert call("scale", "2") == "elastic: 2 workers wanted (local run elastic)\n"
        assert call("suspend") == "elastic: suspended (local run elastic)\n"
        assert job.view()["workers"] == []
        assert call("resume", "elastic") == "elastic: trains again (local run elastic)\n"
        assert job.view()["status"].startswith("Running")
        reasons = [row["reason"] for row in json.loads(call("events", "-o", "json"))]
        assert {"WorkerLost", "WorldResized"} <= set(reasons)
        # If the others go on before the operator notices the loss, there is no record of it.
        records = json.loads(call("status", "-o", "json"))["raw_status"].get("recoveries", [])
        costs = json.loads(call("nodes", "-o", "json"))
        assert sum(row["recoveries"] for row in costs) == sum(record["rung"] != "regrow" for record in records)
        assert {row["where"] for row in costs} <= {"local run elastic"}
        assert json.loads(call("goodput", "elastic", "-o", "json"))["seconds"]["productive"] > 0
        with pytest.raises(JobError, match="no worker 9; it has 0, 1"):
            call("logs", "elastic", "9")
        assert call("delete", "elastic") == "elastic: deleted; its commits stay (local run elastic)\n"
        with pytest.raises(JobError, match=r"has been deleted|ended|no local run"):
            call("kill", "elastic", "0")
        assert job.process is not None
        assert job.process.wait(60) == 130
        assert json.loads(call("status", "elastic", "-o", "json"))["status"] == "Deleted"
        assert call("status").startswith("elastic  ")
        assert call("list", "--ended", "-o", "name") == "elastic\n"
        assert call("logs", "elastic", "--tail", "1")
        spent = json.loads(call("goodput", "elastic", "-o", "json"))
        assert spent["total"] == sum(spent["seconds"].values())
        assert spent == json.loads(call("goodput", "elastic", "-o", "json")), "the life of a run that has ended is over"
        assert [row["reason"] for row in json.loads(call("events", "elastic", "-o", "json"))][: len(reasons)] == reasons
        assert call("status", "--out", str(out)) == call("status")
        with pytest.raises(JobError, match="no local run named 'elastic'"):
            call("suspend", "elastic")
        with pytest.raises(JobError, match="is no folder of a run that has ended"):
            call("status", "--out", str(tmp_path))
    finally:
        job.remove()
