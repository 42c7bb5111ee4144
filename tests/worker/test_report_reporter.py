"""Progress reports against a real HTTP server: what is said, when, by whom, and what is never done to training."""

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from everstep.checkpoint import Occupied
from everstep.contract.messages import MAX_METRICS, REPORT_PATH, Phase, Report
from everstep.reporting import report
from everstep.reporting import report as module
from everstep.reporting.report import MAX_PENDING, Reporter


class Operator:
    """A report endpoint; `answer` decides each response as (status, headers)."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.tokens: list[str | None] = []
        self.answer: Callable[[], tuple[int, dict[str, str]]] = lambda: (204, {})
        self.words = b""  # of a refusal
        operator = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, headers = operator.answer()
                if status == 204:
                    operator.tokens.append(self.headers["Authorization"])
                    operator.reports.append(Report.decode(body))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(operator.words)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}{REPORT_PATH}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def phases(self) -> list[str]:
        return [r.phase.value for r in self.reports]


@contextmanager
def serving() -> Iterator[Operator]:
    operator = Operator()
    try:
        yield operator
    finally:
        operator.close()


@pytest.fixture
def operator() -> Iterator[Operator]:
    with serving() as server:
        yield server


@pytest.fixture
def free_url() -> str:
    with serving() as gone:
        return gone.url


def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def test_life_of_a_process_is_told_in_order(operator: Operator) -> None:
    reporter = Reporter(operator.url, rank=0, world_size=2, round=7, now=lambda: 1000.0)
    reporter.restored(40, 0.25)
    reporter.step(41, total_steps=600, epoch=2, metrics={"loss": 0.5})
    reporter.committed(41, at=999.0)
    reporter.done()
    assert reporter.flush(30)  # a busy machine may need longer than a process waits at its end
    assert operator.phases == ["start", "restore", "train", "save", "done"]
    start, restore, train, save, done = operator.reports
    assert (start.step, start.round, start.world_size, start.at) == (None, 7, 2, 1000.0)
    assert (restore.restored_step, restore.restore_seconds) == (40, 0.25)
    assert (train.step, train.total_steps, train.epoch, train.metrics) == (41, 600, 2, {"loss": 0.5})
    assert (save.committed_step, save.committed_at) == (41, 999.0)
    # Each report is a whole picture; what belonged to one moment is not said again.
    assert (done.step, done.total_steps, done.committed_step, done.metrics) == (41, 600, 41, {"loss": 0.5})
    assert (train.restored_step, done.restore_seconds) == (None, None)


def test_new_start_without_commit_reports_no_restored_step(operator: Operator) -> None:
    reporter = Reporter(operator.url)
    reporter.restored(None, 0.1)
    assert reporter.flush(30)
    assert (operator.reports[-1].phase, operator.reports[-1].restored_step) == (Phase.RESTORE, None)


@pytest.mark.long
def test_many_steps_are_coalesced_and_the_last_one_arrives(operator: Operator) -> None:
    reporter = Reporter(operator.url)
    began = time.monotonic()
    for step in range(1, 2001):
        reporter.step(step, metrics={"loss": float(step)})
        time.sleep(0.0005)
    took = time.monotonic() - began
    assert reporter.flush(30)
    train = [r for r in operator.reports if r.phase is Phase.TRAIN]
    assert train[0].step == 1
    assert (train[-1].step, train[-1].metrics) == (2000, {"loss": 2000.0})
    assert len(train) <= 3 + took * 2
    assert sorted(r.step or 0 for r in train) == [r.step for r in train]


def test_step_seconds_is_the_mean_since_the_previous_report(operator: Operator) -> None:
    reporter = Reporter(operator.url)
    began = time.monotonic()
    reporter.step(10)
    eventually(lambda: len(operator.reports) == 2)
    for step in range(11, 16):
        time.sleep(0.02)
        reporter.step(step)
    longest = time.monotonic() - began
    assert reporter.flush(30)
    before, last = operator.reports[-2:]
    assert last.step_seconds is not None
    assert 0.02 <= last.step_seconds <= longest / (15 - (before.step or 0))
    assert operator.reports[1].step_seconds is None  # of the very first step nothing is known


def test_other_ranks_tell_only_start_restore_first_step_failures_and_end(operator: Operator) -> None:
    reporter = Reporter(operator.url, rank=1, world_size=2)
    reporter.restored(None)
    for step in range(1, 50):
        reporter.step(step)
    reporter.committed(30)
    reporter.save_failed(40, "the store is away")
    reporter.done()
    assert reporter.flush(30)  # a busy machine may need longer than a process waits at its end
    assert operator.phases == ["start", "restore", "train", "save-failed", "done"]
    assert [r.step for r in operator.reports] == [None, None, 1, 49, 49]
    assert operator.reports[3].checkpoint_error == "step 40: the store is away"


def test_another_rank_tells_of_memory_that_grows_and_not_of_every_step(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LOOK_SECONDS", 0.0)
    held = [100]
    reporter = Reporter(operator.url, rank=1, world_size=2)
    reporter.memory.device = lambda: held[0]
    reporter.step(1)
    assert reporter.flush()
    for step in range(2, 20):
        reporter.step(step)
    assert reporter.flush()
    assert operator.phases == ["start", "train"], "nothing grew by a twentieth"
    held[0] = 110
    reporter.step(20)
    assert reporter.flush()
    last = operator.reports[-1]
    assert (last.step, last.peak_device_memory) == (20, 110)
    assert (last.peak_memory or 0) > 2**20, "what this process holds, in bytes"


def test_device_that_cannot_tell_its_memory_does_not_stop_the_report(operator: Operator) -> None:
    reporter = Reporter(operator.url)

    def broken() -> int:
        raise RuntimeError("no device")

    reporter.memory.device = broken
    reporter.step(1)
    assert reporter.flush()
    assert operator.reports[-1].peak_device_memory is None
    assert operator.reports[-1].peak_memory


def test_first_step_after_a_second_restore_is_told_at_once(operator: Operator) -> None:
    reporter = Reporter(operator.url, rank=1, world_size=2)
    reporter.step(5)
    reporter.restored(4)
    reporter.step(5)
    assert reporter.flush(30)
    assert operator.phases == ["start", "train", "restore", "train"]


def test_process_that_goes_on_in_another_round_speaks_as_its_new_rank(operator: Operator) -> None:
    reporter = Reporter(operator.url, rank=1, world_size=3, round=4)
    reporter.step(5)
    reporter.step(6)
    reporter.moved(0, 2, 5)
    reporter.step(7)
    reporter.committed(7)
    assert reporter.flush(30)
    told = [(r.phase.value, r.step, r.rank, r.world_size, r.round) for r in operator.reports]
    assert told == [
        ("start", None, 1, 3, 4), ("train", 5, 1, 3, 4), ("train", 7, 0, 2, 5), ("save", 7, 0, 2, 5),
    ]  # fmt: skip


def test_checkpointer_events_become_reports(operator: Operator) -> None:
    reporter = Reporter(operator.url)
    reporter.on_event("restored", step=3, seconds=0.5)
    reporter.on_event("committed", step=9, at=123.0)
    reporter.on_event("save-failed", step=12, error=OSError("disk full"))
    reporter.on_event("save-skipped", step=13, error="the save before is still in flight")
    reporter.on_event("fenced", reason="round 4 owns the state")
    reporter.on_event("committed")  # a field is missing: training must not notice
    assert reporter.flush(30)
    assert operator.phases == ["start", "restore", "save", "save-failed", "save-skipped"]
    errors = [r.checkpoint_error for r in operator.reports]
    assert errors == [None, None, None, "step 12: disk full", None]
    assert operator.reports[-1].committed_step == 9


def test_url_that_is_in_use_is_told_before_the_process_ends(operator: Operator) -> None:
    """Nobody calls `flush`: the error that is raised next ends the script."""
    reporter = Reporter(operator.url)
    reporter.on_event("unusable", error=Occupied("s3://b/run: job 5f1c, process 7 on letters-w0-0 has the log"))
    assert [(r.phase.value, r.checkpoint_error) for r in operator.reports] == [
        ("start", None),
        ("save-failed", "Occupied: s3://b/run: job 5f1c, process 7 on letters-w0-0 has the log"),
    ]


def test_damaged_commit_is_told_with_the_restore_that_passed_it_over(operator: Operator) -> None:
    reporter = Reporter(operator.url)
    reporter.on_event("stepped-over", n=7, error="data/x/00000.safetensors: checksum differs")
    reporter.on_event("restored", step=3, n=5, seconds=0.5)
    reporter.step(4)
    assert reporter.flush(30)
    told = "log record 7 is stepped over: data/x/00000.safetensors: checksum differs"
    assert [(r.phase.value, r.checkpoint_error) for r in operator.reports] == [
        ("start", None),
        ("restore", told),
        ("train", None),
    ]


def test_tensors_are_read_off_thread_and_release_the_graph(operator: Operator) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    reporter = Reporter(operator.url)
    reporter.step(1, metrics={"loss": loss, "accuracy": torch.tensor(0.5), "lr": 1e-3})
    with reporter._wake:  # its thread takes from the queue
        held = [m for p in reporter._queue for m in p.metrics.values() if isinstance(m, torch.Tensor)]
    assert all(m.grad_fn is None for m in held)
    assert reporter.flush(30)
    assert operator.reports[-1].metrics == {"loss": 6.0, "accuracy": 0.5, "lr": 1e-3}


def test_metric_on_an_accelerator_is_left_out_and_never_read(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(operator.url)
    on_device = torch.empty((), device="meta")  # reading it raises, as reading from a GPU would wait
    for step in (1, 2, 3):
        reporter.step(step, metrics={"loss": on_device, "lr": 0.1})
    assert reporter.flush(30)
    assert operator.reports[-1].metrics == {"lr": 0.1}
    assert [r.getMessage() for r in caplog.records] == [
        "metric 'loss' is on meta and not reported: reading it would wait for the device"
    ]


def test_metrics_that_are_no_numbers_or_too_many_do_not_stop_the_report(operator: Operator) -> None:
    reporter = Reporter(operator.url)
    metrics = {"text": "abc", "vector": torch.zeros(3)} | {f"m{i}": float(i) for i in range(100)}
    reporter.step(1, metrics=metrics)
    assert reporter.flush(30)
    assert operator.reports[-1].metrics == {f"m{i}": float(i) for i in range(MAX_METRICS - 2)}


def test_token_is_read_afresh_for_every_report(operator: Operator, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    reporter = Reporter(operator.url, str(token))
    reporter.started()
    eventually(lambda: operator.tokens == ["Bearer first"])
    token.write_text("second\n")
    reporter.step(1)
    assert reporter.flush(30)
    assert operator.tokens == ["Bearer first", "Bearer second"]


def test_redirect_leads_to_the_leader_with_body_and_token(operator: Operator, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with serving() as follower:
        follower.answer = lambda: (307, {"Location": operator.url})
        reporter = Reporter(follower.url, str(token))
        reporter.step(1)
        assert reporter.flush(30)
    assert operator.phases == ["start", "train"]
    assert operator.tokens == ["Bearer secret"] * 2


@pytest.mark.parametrize("location", ["{root}/login", "{url}?next=1", "https://{host}/v1/report", "/login"])
def test_token_goes_to_no_page_that_something_in_between_sends_requests_to(
    location: str, operator: Operator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    root, host = operator.url.removesuffix(REPORT_PATH), urlsplit(operator.url).netloc
    with serving() as between:
        between.answer = lambda: (307, {"Location": location.format(root=root, url=operator.url, host=host)})
        reporter = Reporter(between.url, str(token))
        reporter.step(1)
        eventually(lambda: "the pod's token goes with it" in caplog.text)
        assert not operator.tokens
        between.answer = lambda: (307, {"Location": operator.url})
        assert reporter.flush(30), "and what was to be said is said when it is gone"
    assert operator.phases == ["start", "train"]


def test_redirect_loop_ends_and_training_goes_on(operator: Operator) -> None:
    operator.answer = lambda: (307, {"Location": operator.url})
    reporter = Reporter(operator.url)
    reporter.step(1)
    assert not reporter.flush(0.3)
    operator.answer = lambda: (204, {})
    assert reporter.flush(30)
    assert operator.phases == ["start", "train"]


def test_operator_that_is_away_costs_one_log_line_and_no_time(free_url: str, caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(free_url)
    began, used = time.monotonic(), time.thread_time()
    for step in range(1, 5001):
        reporter.step(step, metrics={"loss": 0.1})
    assert time.thread_time() - used < 2.0
    assert time.monotonic() - began < 30, "a step waits for nobody; a busy machine may let it wait"
    eventually(lambda: caplog.records)
    began = time.monotonic()
    reporter.done()
    assert time.monotonic() - began < 15, "two seconds, and not for ever"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "training goes on" in caplog.text
    assert len(reporter._queue) <= MAX_PENDING


def test_reports_of_a_recovery_arrive_once_the_operator_is_back(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    operator.answer = lambda: (503, {"Retry-After": "1"})
    reporter = Reporter(operator.url, rank=1, world_size=2)
    reporter.restored(8, 0.1)
    reporter.step(9)
    eventually(lambda: caplog.records)
    operator.answer = lambda: (204, {})
    assert reporter.flush(30)
    assert operator.phases == ["start", "restore", "train"]
    assert operator.reports[-1].step == 9
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


def test_report_that_is_refused_is_dropped_and_the_next_one_sent(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    answers: Iterator[tuple[int, dict[str, str]]] = iter([(400, {}), (413, {})])
    operator.answer = lambda: next(answers, (204, {}))
    operator.words = b'{"reason": "step: it is no number"}'
    reporter = Reporter(operator.url)
    reporter.restored(1)
    reporter.step(2)
    assert reporter.flush(30)
    assert operator.phases == ["train"]
    assert "answered 400: step: it is no number" in caplog.text


@pytest.mark.long_but("-200")
@pytest.mark.parametrize("status", [200, 201, 301, 302, 400, 403, 404, 405, 413, 502, 503])
@pytest.mark.parametrize("says", [b"", b"<html></html>", b'{"kind": "Status", "reason": "NotFound"}'])
def test_report_that_another_answers_in_the_operators_place_is_kept(
    operator: Operator, status: int, says: bytes
) -> None:
    answers: Iterator[tuple[int, dict[str, str]]] = iter([(status, {"Location": "https://127.0.0.1:9/"})])
    operator.answer, operator.words = lambda: next(answers, (204, {})), says
    reporter = Reporter(operator.url)
    reporter.restored(1)
    reporter.step(2)
    assert reporter.flush(30)
    assert operator.phases == ["start", "restore", "train"]


@pytest.mark.long
def test_operator_that_never_answers_does_not_hold_up_the_end(operator: Operator) -> None:
    stuck = threading.Event()
    operator.answer = lambda: (stuck.wait(60), (204, {}))[1]
    reporter = Reporter(operator.url)
    reporter.step(1)
    began = time.monotonic()
    reporter.done()
    assert time.monotonic() - began < 15, "two seconds, and not for ever"
    stuck.set()


def test_without_a_url_nothing_happens() -> None:
    reporter = Reporter.from_env({})
    reporter.restored(1)
    reporter.step(2, metrics={"loss": 1.0})
    reporter.done()
    assert (reporter._thread, len(reporter._queue)) == (None, 0)


@pytest.mark.parametrize("url", ["nonsense", "ftp://host/x", "http://"])
def test_unusable_url_is_said_once_and_training_goes_on(url: str, caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(url)
    for step in range(1, 4):
        reporter.step(step)
    assert reporter.flush(5)
    # The reporter of an earlier test may still be trying, and say so here.
    assert [r.levelname for r in caplog.records if url in r.getMessage()] == ["WARNING"]


def test_environment_names_the_process() -> None:
    environ = {"EVERSTEP_REPORT_URL": "http://x/", "RANK": "3", "WORLD_SIZE": "4", "EVERSTEP_ROUND": "12"}
    known = Reporter.from_env(environ)._known
    assert (known.rank, known.world_size, known.round) == (3, 4, 12)
    assert Reporter.from_env({"RANK": "junk"})._known.rank == 0


def _child(reporter: Reporter) -> None:
    reporter.step(77)
    assert reporter.flush(30)


def test_forked_child_reports_for_itself_and_never_hangs(operator: Operator) -> None:
    reporter = Reporter(operator.url)
    reporter.step(1)
    with reporter._wake:  # the worst moment to fork: the lock is held
        child = multiprocessing.get_context("fork").Process(target=_child, args=(reporter,))
        child.start()
        child.join(60)
    assert child.exitcode == 0
    assert reporter.flush(30)
    assert {r.step for r in operator.reports if r.phase is Phase.TRAIN} == {1, 77}


def test_last_report_is_sent_when_the_script_just_ends(operator: Operator) -> None:
    script = """
import everstep.reporting.report as r
r.FLUSH_SECONDS = 30.0  # the machine may be busy
for i in range(1, 101):
    r.report(step=i, metrics={'loss': 1 / i})
"""
    env = {**os.environ, "EVERSTEP_REPORT_URL": operator.url, "RANK": "0", "WORLD_SIZE": "1"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=60)
    assert operator.reports[-1].step == 100


def test_module_imports_nothing_beyond_the_standard_library() -> None:
    script = (
        "import sys; before = set(sys.modules); import everstep.reporting.report, json\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names) - {'everstep'}\n"
        "print(json.dumps(sorted(new)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    # `sysconfig` reads its figures from a module that is named after the platform.
    assert [name for name in json.loads(out.stdout) if not name.startswith("_sysconfigdata_")] == []
    assert module.default_reporter() is module.default_reporter()
