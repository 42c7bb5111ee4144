"""The commands about jobs of a cluster whose API server is away for a moment."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from everstep.cli import main
from everstep.contract import labels
from everstep.jobs import cluster
from everstep.jobs.source import JobError, Unreachable
from support.commands import Call, caller

POD = {
    "metadata": {"name": "train-w1-0", "uid": "p", "labels": {labels.WORKER_INDEX: "1", labels.INCARNATION: "0"}},
    "status": {},
}


@dataclass
class Api:
    """One job with one pod. `away`: how many of the next requests after the first get no answer; the changes that they
    ask for are made all the same."""

    away: int = 0
    changes: list[str] = field(default_factory=list)
    pods: list[dict[str, Any]] = field(default_factory=lambda: [POD])
    suspended: bool = True
    generation: int = 1
    requests: int = 0
    progress: dict[str, Any] = field(default_factory=dict)

    def job(self) -> dict[str, Any]:
        ready = {"type": "Ready", "reason": "Suspended" if self.suspended else "Running", "message": "2/2 ready"}
        return {
            "metadata": {"name": "train", "namespace": "ml", "uid": "u", "generation": self.generation},
            "spec": {"elastic": {"minReplicas": 1, "maxReplicas": 3}},
            "status": {
                "observedGeneration": self.generation,
                "conditions": [ready],
                "readyReplicas": 1,
                "replicas": 2,
                "progress": self.progress,
            },
        }

    def answer(self, method: str, path: str) -> Any:
        if method in ("PATCH", "DELETE"):
            self.changes.append(f"{method} {path}")
        if method == "PATCH":
            self.suspended, self.generation = False, self.generation + 1
        if method == "DELETE":
            self.pods = []
        if "/pods" in path or "/events" in path:
            return {"items": self.pods if "/pods" in path else []}
        if path.partition("?")[0].endswith(f"/{labels.PLURAL}"):
            return {"items": [self.job()]}
        return self.job()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    made = Api()

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            made.requests += 1
            if made.away > 0 and made.requests > 1:
                made.away -= 1
                if self.command != "GET":
                    made.answer(self.command, self.path)
                self.close_connection = True
                return
            body = json.dumps(made.answer(self.command, self.path)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PATCH = do_DELETE = do

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(cluster, "PAUSE_SECONDS", 0.01)
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def call() -> Call:
    return caller("-n", "ml")


def test_reads_behind_a_change_wait_for_a_server_that_is_away(api: Api, call: Call) -> None:
    api.away = 9  # more than the client's own repetitions
    assert call("resume", "train").startswith("train: trains again (namespace ml")
    assert api.away == 0
    assert len(api.changes) == 1


def test_kill_whose_answer_is_lost_has_killed(api: Api, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = api.answer

    def answer(method: str, path: str) -> Any:
        if method == "GET" and "/pods" in path and api.pods and not api.changes:
            api.away = 5
        return asked(method, path)

    monkeypatch.setattr(api, "answer", answer)
    assert call("kill", "train", "1").startswith("pod train-w1-0 deleted by force")
    assert api.changes


def test_server_that_stays_away_ends_the_command_in_time(api: Api, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "RETRY_SECONDS", 0.2)
    api.away = 100_000
    with pytest.raises(Unreachable, match="does not answer"):
        call("resume", "train")


def test_scale_beyond_the_bounds_names_them_and_sends_nothing(api: Api, call: Call) -> None:
    with pytest.raises(JobError, match=r"^train can have 1 to 3 workers, not 9: spec\.elastic"):
        call("scale", "train", "9")
    assert api.changes == []
    listed = json.loads(call("status", "train", "-o", "json"))
    assert (listed["ready"], listed["wanted"]) == (1, 2)


def test_top_says_how_fast_each_job_trains(api: Api, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    api.suspended = False
    at = "2026-01-01T00:00:00Z"
    api.progress = {"step": 100, "totalSteps": 500, "etaSeconds": 80, "updatedAt": at}
    (row,) = json.loads(call("top", "-o", "json"))
    assert (row["job"], row["step"], row["ready"], row["steps_per_second"]) == ("train", 100, 1, 5.0)
    assert call("top").splitlines()[1].split()[:5] == ["train", "Running", "1/2", "100/500", "5"]

    looks = 0

    def later(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise KeyboardInterrupt
        api.progress = {"step": 130, "updatedAt": "2026-01-01T00:00:10Z"}

    monkeypatch.setattr("everstep.cli.jobs.top.time.sleep", later)
    done = CliRunner().invoke(main.app, ["top", "-w", "-n", "ml", "-o", "json"])
    assert done.exit_code == 130
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(done.stdout)
    second, _ = decoder.raw_decode(done.stdout[end:].lstrip())
    assert [first[0]["steps_per_second"], second[0]["steps_per_second"]] == [5.0, 3.0], "by the times of the statuses"
    api.suspended = True
    assert json.loads(call("top", "-o", "json"))[0]["steps_per_second"] is None
