"""A program that cannot start ends its job soon, in its own words; one that has run keeps its whole budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.status import Restarts
from everstep_operator.plan.decide import restart_budget, start_failures
from everstep_operator.plan.snapshot import Exit, PodPhase, ReportedProgress, Snapshot, WorkerPod
from everstep_operator.plan.state.losses import Loss, losses_among

NO_SCRIPT = (Path(__file__).parent / "transcripts/torchrun/no_script.txt").read_text()
WORDS = "python: can't open file '/w/train.py': [Errno 2] No such file or directory"


@pytest.fixture
def world() -> Any:
    return plan_world.World()


def loss_of(world: Any, code: int, message: str, reason: str = "Error") -> Loss:
    snapshot = world.snapshot()
    exit_ = Exit(code, reason, message, snapshot.now)
    pod = WorkerPod("digits-w0-0", "u", 0, 0, 1, PodPhase.FAILED, node="n1", exit=exit_)
    [loss] = losses_among(snapshot, {0: pod}, {0: True})
    return loss


def test_words_of_the_program_are_found_before_those_of_torchrun(world: Any) -> None:
    loss = loss_of(world, 1, NO_SCRIPT)
    said = "/venv/bin/python: can't open file '/job/nofile.py': [Errno 2] No such file or directory"
    assert (loss.exit_code, loss.detail, loss.cannot_start) == (2, f"exit code 2: {said}", True)
    assert loss.log_lines[-1] == said
    assert not any("torchrun" in line for line in loss.log_lines)


def test_torchrun_without_a_folder_for_temporary_files_is_told_the_volume_to_mount(world: Any) -> None:
    """tests/agent/test_agent_start.py has what torchrun says on a root that is read-only."""
    said = "FileNotFoundError: [Errno 2] No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/']"
    loss = loss_of(world, 1, f"Traceback (most recent call last):\n  ...\n{said}\n")
    assert loss.cannot_start
    assert loss.detail.startswith(f"exit code 1: {said}: mount an emptyDir at /tmp (volumes: ")
    assert loss.detail.endswith("or let TMPDIR name a folder that can be written to")


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (2, WORDS, "Error"),
        (126, "", "Error"),
        (127, "sh: 1: trian: not found", "Error"),
        (1, "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'x'", "Error"),
        (1, "[rank0]: ImportError: libx.so: cannot open shared object file", "Error"),
        (1, "  File \"t.py\", line 3\n    x = (\nSyntaxError: '(' was never closed", "Error"),
        (1, "/usr/bin/python: No module named train", "Error"),
        (2, "usage: t.py [-h]\nt.py: error: unrecognized arguments: --lr 1", "Error"),
        (128, 'runc create failed: exec: "x": executable file not found in $PATH: unknown', "StartError"),
        (128, "runc create failed: exec /x.sh: exec format error", "StartError"),
        (128, 'exec: "/x": permission denied: unknown', "ContainerCannotRun"),
    ],
)  # fmt: skip
def test_failure_that_repeats_itself_is_known_by_code_or_words(
    world: Any, code: int, message: str, reason: str
) -> None:
    assert loss_of(world, code, message, reason).cannot_start


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (1, "ValueError: bad batch", "Error"),
        (1, "ConnectionError: data.example: No such host is known", "Error"),
        (1, "FileNotFoundError: [Errno 2] No such file or directory: '/data/a.bin'", "Error"),
        (1, "RuntimeError: the plugin raised ImportError", "Error"),
        (2, "", "Error"),
        (137, "", "OOMKilled"),
        (137, WORDS, "Error"),  # killed: what it had said before is not why
        (84, WORDS, "Error"),
        (128, "failed to create shim task: resource temporarily unavailable", "StartError"),
        (1, "ModuleNotFoundError: No module named 'x'\nRuntimeError: Connection reset by peer", "Error"),
    ],
)
def test_failure_that_may_be_bad_luck_is_none(world: Any, code: int, message: str, reason: str) -> None:
    assert not loss_of(world, code, message, reason).cannot_start


def limit(snapshot: Snapshot, tries: int) -> Snapshot:
    """After so many failures of a program that could not start."""
    job = snapshot.job
    counted = Restarts(user_code=tries, start_failures=tries, in_window=tries)
    return replace(snapshot, job=replace(job, status=job.status.model_copy(update={"restarts": counted})))


def test_third_try_is_the_last_of_a_job_that_never_ran(world: Any) -> None:
    loss = loss_of(world, 2, WORDS)
    for tries in (0, 1):
        judged = restart_budget.judge(limit(world.snapshot(), tries), loss)
        assert isinstance(judged, restart_budget.Restart)
        assert judged.restarts.start_failures == judged.restarts.user_code == tries + 1
    last = restart_budget.judge(limit(world.snapshot(), 2), loss)
    assert isinstance(last, restart_budget.Fail)
    assert last.reason == "CannotStart"
    assert WORDS in last.message


def test_losses_that_follow_the_first_are_no_try_of_their_own(world: Any) -> None:
    snapshot = limit(world.snapshot(), 2)
    counted = snapshot.job.status.restarts.model_copy(update={"last_at": snapshot.now, "incident_at": snapshot.now})
    snapshot = replace(
        snapshot, job=replace(snapshot.job, status=snapshot.job.status.model_copy(update={"restarts": counted}))
    )
    assert restart_budget.judge(snapshot, loss_of(world, 2, WORDS), follows=True) == restart_budget.Restart(counted)


def test_rule_of_the_user_goes_before(world: Any) -> None:
    world.do_rule("onExitCodes", "2", "RestartUncharged")
    judged = restart_budget.judge(limit(world.snapshot(), 2), loss_of(world, 2, WORDS))
    assert isinstance(judged, restart_budget.Restart)
    assert judged.restarts.start_failures == 2


def test_smaller_budget_of_restarts_goes_before(world: Any) -> None:
    world.do_job("recovery.maxRestarts=0")
    judged = restart_budget.judge(world.snapshot(), loss_of(world, 2, WORDS))
    assert isinstance(judged, restart_budget.Fail)
    assert judged.reason == "RestartBudgetExhausted"


def reports(world: Any) -> None:
    world.progress = ReportedProgress(updated_at=world.now)


def was_lost_for_another_reason(world: Any) -> None:
    world.do_fail("0", "137")
    world.reconcile()


def has_stood_for_minutes(world: Any) -> None:
    world.do_advance("121")


def was_suspended_and_resumed(world: Any) -> None:
    world.do_advance("10")
    for value in ("true", "false"):
        world.do_job(f"suspend={value}")
        world.reconcile()
        world.pods.clear()
        world.do_advance("5")
        world.reconcile()


def was_resized(world: Any) -> None:
    world.do_advance("10")
    world.do_job("replicas=3")
    world.reconcile()


def is_old(world: Any) -> None:
    world.do_advance("1801")


def nothing_happened(world: Any) -> None:
    world.do_advance("30")


def failed_to_start_before(world: Any) -> None:
    world.do_fail("0", "2", WORDS)
    world.reconcile()


@pytest.mark.parametrize(
    ("story", "has_run"),
    [
        (reports, True),
        (was_lost_for_another_reason, True),
        (has_stood_for_minutes, True),
        (was_suspended_and_resumed, True),
        (was_resized, True),
        (is_old, True),
        (nothing_happened, False),
        (failed_to_start_before, False),
    ],
)
def test_job_of_which_anything_shows_that_it_ran_is_not_ended_early(
    world: Any, story: Callable[[Any], None], has_run: bool
) -> None:
    for line in ("settle", "ready 0 1", "reconcile"):
        world.run(line)
    story(world)
    assert start_failures.has_run(world.snapshot()) is has_run


@pytest.mark.parametrize(
    "before",
    [
        "reject 0",
        "evict 0",
        "delete 0",
        "node-lost n1",
        "reject 0 DeadlineExceeded",
        "init-fails 0 fetch 1",
        'fail 0 128 "failed to create shim task" StartError',
    ],
)
def test_worker_that_had_not_started_does_not_show_that_the_program_has_run(world: Any, before: str) -> None:
    """Its restart is counted. The script that is missing afterwards is missing for the first time."""
    for line in ("settle", before, "reconcile"):
        world.run(line)
    world.do_node_back("n1")
    world.do_advance("61")
    world.run("settle")
    assert world.status.restarts.total == 1
    assert not start_failures.has_run(world.snapshot())
    for _ in range(3):
        world.do_fail("0", "2", WORDS)
        world.reconcile()
        world.do_advance("300")
        world.run("settle")
    assert world.status.failure is not None
    assert world.status.failure.message.startswith("CannotStart: ")


def test_worker_that_had_started_shows_it_whatever_it_was_lost_by(world: Any) -> None:
    for line in ("settle", "ready 0 1", "reject 0 Preempting", "reconcile"):
        world.run(line)
    assert world.status.restarts.unstarted == 0
    assert start_failures.has_run(world.snapshot())


def test_words_made_to_be_slow_cost_little(world: Any) -> None:
    """Lines of a program are untrusted; the patterns look at bounded parts of them."""
    for text in ("exec: " * 2000, "can't open " * 1000, "a." * 5000 + "Err", ": error" * 2000 + "\n" * 3000):
        assert len(loss_of(world, 1, text).detail) < 600


def test_worker_that_fails_alone_while_the_others_train_never_ends_their_job() -> None:
    """One node has a broken mount, and the script does not report: only the other pods tell that it can start."""
    for took in (1, 5, 15, 35):
        world = elastic_world.ElasticWorld()
        for line in ("settle", "ready 0 1 2", "reconcile"):
            world.run(line)
        for attempt in range(8):
            world.do_advance(str(took))
            world.do_fail("3", "1", "ImportError: libcuda.so.1: cannot open shared object file")
            world.do_reconcile()
            assert world.status.failure is None, f"{took} s a try, try {attempt + 1}: {world.status.failure}"
            world.do_advance("300")  # beyond the back-off
            world.do_reconcile()


@pytest.mark.parametrize("step", [None, "5"])
def test_worker_that_reports_and_fails_alone_never_ends_the_job_of_the_others(step: str | None) -> None:
    """The others train, and report nothing, or take long for a step; it fails before it is in their round."""
    world = elastic_world.ElasticWorld()
    for line in ("settle", "ready 0 1 2", "form", "reconcile"):
        world.run(line)
    if step is not None:
        world.do_step(step)
    for attempt in range(8):
        world.do_advance("15")
        world.progress = replace(world.progress, round=world.view.round, updated_at=world.now)  # it says that it starts
        world.do_fail("3", "1", "RuntimeError: CUDA error: out of memory")
        world.do_reconcile()
        assert world.status.failure is None, f"try {attempt + 1}: {world.status.failure}"
        world.do_advance("300")  # beyond the back-off
        world.do_reconcile()


def test_members_that_fail_again_and_again_without_a_step_end_their_job() -> None:
    world = elastic_world.ElasticWorld()
    for line in ("settle", "ready 0 1 2 3", "form", "reconcile", "step 5"):
        world.run(line)
    for index in "3213":
        world.do_advance("60")
        world.do_fail(index, "1", "RuntimeError: a sample that nothing can be made of")
        world.do_reconcile()
        if world.status.failure is not None:
            break
        world.do_advance("300")
        world.do_reconcile()
        world.do_ready(index)
        world.do_form()
        world.do_reconcile()
    assert world.status.failure is not None
    assert world.status.failure.message.startswith("NoProgress: ")


@pytest.mark.parametrize("backend", ["everstep", "etcd"])
def test_program_that_is_nowhere_ends_its_job_at_the_third_try(backend: str) -> None:
    """The agents are ready, wait for each other, and all fail within a few seconds; one has no node yet."""
    world = elastic_world.ElasticWorld()
    if backend == "etcd":
        world.do_etcd()
    world.do_settle()
    for _ in range(2):
        world.do_ready("0", "1", "2")
        world.do_advance("30")
        if backend == "everstep":
            world.do_form()
        for index in "012":
            world.do_fail(index, "2", WORDS)
            world.do_reconcile()
            world.do_advance("1")
        world.do_advance("10")
        world.do_reconcile()
    world.do_ready("0", "1", "2")
    world.do_advance("30")
    world.do_fail("0", "2", WORDS)
    world.do_reconcile()
    assert world.status.failure is not None
    assert world.status.failure.message.startswith("CannotStart: ")


def is_ready_for_longer(world: Any) -> None:
    world.do_ready("1")
    world.do_advance("16")


def is_ready_for_as_long(world: Any) -> None:
    world.do_advance("11")
    world.do_ready("1")
    world.do_advance("5")


def is_on_a_lost_node(world: Any) -> None:
    is_ready_for_longer(world)
    world.do_node_lost("n2")


def is_being_deleted(world: Any) -> None:
    is_ready_for_longer(world)
    world.do_delete("1")


def is_not_ready(world: Any) -> None:
    world.do_advance("16")


def has_succeeded(world: Any) -> None:
    world.do_advance("16")
    world.do_succeed("1")


@pytest.mark.parametrize(
    ("other", "runs"),
    [
        (is_ready_for_longer, True),
        (has_succeeded, True),
        (is_ready_for_as_long, False),
        (is_on_a_lost_node, False),
        (is_being_deleted, False),
        (is_not_ready, False),
    ],
)
def test_another_worker_shows_that_the_program_runs_only_if_it_outlives_the_failed_one(
    world: Any, other: Callable[[Any], None], runs: bool
) -> None:
    world.do_settle()
    name = world.current(0)
    exit_ = Exit(2, "Error", WORDS, world.now + timedelta(seconds=10))  # it took 10 s
    other(world)
    world.change(name, phase=PodPhase.FAILED, exit=exit_)
    assert start_failures.runs_elsewhere(world.snapshot(), 0, name) is runs
