"""Known answers: who was lost first, why, and who pays for it.

The texts in transcripts/torchrun are what torch 2.13 printed when it ran a failing script, a killed process and
a killed peer: the last 2,048 bytes, which is what the kubelet keeps of a log (FallbackToLogsOnError).
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.conditions import Cause
from everstep_operator.plan.snapshot import Exit, NodeHealth, NodeView, PodPhase, Snapshot, WorkerPod
from everstep_operator.plan.state.losses import CHARGES, Charge, losses_among

SAMPLES = Path(__file__).parent / "transcripts/torchrun"
RAISED, KILLED, EXITED_64, PEER = (
    (SAMPLES / f"{name}.txt").read_text() for name in ("raised", "killed", "exited_64", "peer_killed")
)
CUT_OFF = "host-7-1f was not taken into a round newer than 3 in time: 2 of at least 3 agents wait"
NOW = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)


def record(error: str, exit_code: int = 1, lines: list[str] | None = None) -> str:
    """As everstep.contract.termination writes it."""
    return json.dumps({"everstep": 1, "rank": "0", "exit_code": exit_code, "error": error, "lines": lines or []},
                      separators=(",", ":")) + "\n"  # fmt: skip


def failed(code: int = 1, message: str = "", reason: str = "Error", at: float = 0, **fields: Any) -> dict[str, Any]:
    """Fields of a pod whose worker container ended `at` seconds after NOW."""
    exit_ = Exit(code, reason, message, NOW + timedelta(seconds=at))
    return {"phase": PodPhase.FAILED, "exit": exit_, **fields}


RUNNING: dict[str, Any] = {"phase": PodPhase.RUNNING, "ready": True}


@pytest.fixture
def judge() -> Any:
    """The losses of a round of pods, given as fields; None is a pod that is not there."""

    def call(*pods: dict[str, Any] | None, nodes: dict[str, bool] | None = None, formed: bool = True) -> Any:
        base: Snapshot = plan_world.World().snapshot()
        ready = {"n1": True, **(nodes or {})}
        snapshot = replace(
            base,
            now=NOW,
            nodes={n: NodeView(n, NodeHealth.READY if up else NodeHealth.SILENT, NOW) for n, up in ready.items()},
        )
        current = {}
        for index, fields in enumerate(pods):
            if fields is not None:
                pod = WorkerPod(f"digits-w{index}-0", f"u{index}", index, 0, 1, PodPhase.RUNNING, node="n1",
                                created_at=NOW - timedelta(hours=1))  # fmt: skip
                current[index] = replace(pod, **fields)
        return losses_among(snapshot, current, dict.fromkeys(range(len(pods)), formed))

    return call


# The kubelet's reasons for a pod that it does not let run; the last is one that nobody knows yet.
REJECTIONS = (
    *("UnexpectedAdmissionError", "OutOfcpu", "OutOfmemory", "OutOfnvidia.com/gpu", "OutOfpods", "NodeAffinity"),
    *("TopologyAffinityError", "NodeShutdown", "Terminated", "NodeName", "NodePorts", "InvalidNodeInfo"),
    *("UnexpectedPodResources", "AppArmor", "PodOSNotSupported", "SomethingNew"),
)


@pytest.mark.parametrize(
    ("fields", "cause", "code", "charge"),
    [
        (failed(1, RAISED), Cause.ERROR, 1, Charge.USER_CODE),
        (failed(1, EXITED_64), Cause.ERROR, 64, Charge.USER_CODE),
        (failed(1, KILLED), Cause.SIGNALED, 137, Charge.INFRASTRUCTURE),
        (failed(1, PEER), Cause.PEER_LOST, 1, Charge.INFRASTRUCTURE),
        (failed(137), Cause.SIGNALED, 137, Charge.INFRASTRUCTURE),
        (failed(143), Cause.SIGNALED, 143, Charge.INFRASTRUCTURE),
        (failed(137, "", "OOMKilled"), Cause.OOM_KILLED, 137, Charge.USER_CODE),
        (failed(1, KILLED, "OOMKilled"), Cause.OOM_KILLED, 137, Charge.USER_CODE),
        (failed(128, "exec: torchrun: not found", "StartError"), Cause.START_FAILED, 128, Charge.USER_CODE),
        (failed(255, "", "Unknown"), Cause.NODE_LOST, 255, Charge.INFRASTRUCTURE),
        (failed(137, "", "ContainerStatusUnknown"), Cause.NODE_LOST, 137, Charge.INFRASTRUCTURE),
        (failed(84), Cause.FENCED, 84, Charge.INFRASTRUCTURE),
        (failed(1, record("FencedError: round 4 owns the log", 84)), Cause.FENCED, 84, Charge.INFRASTRUCTURE),
        (failed(1, record("asked to stop (SIGTERM)", 86)), Cause.PREEMPTED, 86, Charge.PREEMPTION),
        (failed(1, record("StoreUnusable: 403", 85)), Cause.STORE_UNUSABLE, 85, Charge.USER_CODE),
        (failed(1, "RendezvousTimeoutError"), Cause.RENDEZVOUS_TIMEOUT, 1, Charge.INFRASTRUCTURE),
        (failed(1, record(CUT_OFF)), Cause.RENDEZVOUS_TIMEOUT, 1, Charge.INFRASTRUCTURE),
        (failed(1, record("ValueError: loss is not finite")), Cause.ERROR, 1, Charge.USER_CODE),
        (failed(1, record("RuntimeError: Connection closed by peer")), Cause.PEER_LOST, 1, Charge.INFRASTRUCTURE),
        ({**failed(143), "reason": "Evicted"}, Cause.EVICTED, None, Charge.PREEMPTION),
        ({**RUNNING, "disruption": "EvictionByEvictionAPI"}, Cause.DISRUPTION_TARGET, None, Charge.PREEMPTION),
        ({"phase": PodPhase.FAILED, "reason": "Evicted"}, Cause.EVICTED, None, Charge.PREEMPTION),
        ({"phase": PodPhase.FAILED, "reason": "NodeLost"}, Cause.NODE_LOST, None, Charge.INFRASTRUCTURE),
        *(({"phase": PodPhase.FAILED, "reason": reason}, Cause.REJECTED, None, Charge.INFRASTRUCTURE)
          for reason in REJECTIONS),
        *(({**failed(137), "reason": reason}, Cause.NODE_LOST, 137, Charge.INFRASTRUCTURE)
          for reason in ("NodeShutdown", "Terminated")),
        ({"phase": PodPhase.FAILED, "reason": "Preempting"}, Cause.DISRUPTION_TARGET, None, Charge.PREEMPTION),
        ({**failed(1), "reason": "Preempting"}, Cause.DISRUPTION_TARGET, 1, Charge.PREEMPTION),
        ({**failed(1), "reason": "NewReason"}, Cause.EVICTED, 1, Charge.PREEMPTION),
        ({**failed(143), "reason": "DeadlineExceeded"}, Cause.DEADLINE_EXCEEDED, 143, Charge.USER_CODE),
        ({"phase": PodPhase.FAILED, "reason": "DeadlineExceeded"}, Cause.DEADLINE_EXCEEDED, None, Charge.USER_CODE),
        ({"phase": PodPhase.FAILED}, Cause.START_FAILED, None, Charge.USER_CODE),
        ({**RUNNING, "deleted_at": NOW}, Cause.POD_DELETED, None, Charge.INFRASTRUCTURE),
        ({**RUNNING, "node": "n2"}, Cause.NODE_LOST, None, Charge.INFRASTRUCTURE),
        ({**RUNNING, "node": "gone"}, Cause.NODE_LOST, None, Charge.INFRASTRUCTURE),
        (None, Cause.POD_DELETED, None, Charge.INFRASTRUCTURE),
    ],
)  # fmt: skip
def test_lost_worker_is_attributed_and_charged(
    judge: Any, fields: dict[str, Any] | None, cause: Cause, code: int | None, charge: Charge
) -> None:
    [loss] = judge(RUNNING, fields, nodes={"n2": False})
    assert (loss.index, loss.cause, loss.exit_code, loss.charge) == (1, cause, code, charge)


@pytest.mark.parametrize(
    ("reason", "message", "detail"),
    [
        (
            "Evicted",
            "The node was low on resource: memory. ",
            "evicted by the kubelet: The node was low on resource: mem",
        ),
        (
            "UnexpectedAdmissionError",
            "no healthy devices\npresent",
            "rejected by the kubelet: UnexpectedAdmissionError: no",
        ),
        ("Evicted", None, "evicted by the kubelet"),
    ],
)
def test_words_of_the_kubelet_are_those_of_the_loss(judge: Any, reason: str, message: str | None, detail: str) -> None:
    fields = {"phase": PodPhase.FAILED, "reason": reason, "message": message, "disruption": None}
    [loss] = judge(RUNNING, fields)
    assert loss.detail.startswith(detail)
    assert "\n" not in loss.detail


def test_every_cause_has_somebody_who_pays() -> None:
    assert set(CHARGES) == set(Cause)


ENDED = Exit(0, finished_at=NOW - timedelta(seconds=1))


@pytest.mark.parametrize(
    "fields",
    [
        RUNNING,
        {"phase": PodPhase.PENDING, "node": None},
        {"phase": PodPhase.SUCCEEDED, "exit": Exit(0)},
        {"phase": PodPhase.SUCCEEDED, "exit": ENDED, "deleted_at": NOW, "node": "gone"},
        {"phase": PodPhase.UNKNOWN},
        {"phase": PodPhase.RUNNING, "node": "new", "created_at": NOW - timedelta(seconds=5)},
    ],
)
def test_worker_that_may_still_train_is_not_lost(judge: Any, fields: dict[str, Any]) -> None:
    assert judge(RUNNING, fields) == ()


def test_pod_that_was_not_created_yet_is_not_lost(judge: Any) -> None:
    assert judge(RUNNING, None, formed=False) == ()


def test_root_cause_is_found_behind_peers_whose_clocks_are_ahead_of_it(judge: Any) -> None:
    found = judge(failed(1, PEER, at=-9), failed(1, PEER, at=-8), failed(1, RAISED, at=5), failed(1, PEER, at=-7))
    assert [loss.index for loss in found] == [2, 0, 1, 3]
    assert found[0].cause is Cause.ERROR


def test_drained_worker_is_the_root_of_peers_that_committed_and_left_with_it(judge: Any) -> None:
    left = failed(1, record("asked to stop (SIGTERM)", 86), at=-9)
    found = judge(left, {**RUNNING, "deleted_at": NOW}, failed(1, PEER, at=-9), left)
    assert [loss.index for loss in found] == [1, 0, 3, 2]
    assert found[0].cause is Cause.POD_DELETED


def test_of_two_causes_the_earlier_one_is_the_root(judge: Any) -> None:
    found = judge(failed(1, RAISED, at=2), failed(1, EXITED_64, at=1))
    assert [loss.index for loss in found] == [1, 0]


def test_own_word_of_the_process_goes_before_what_torchrun_and_the_kubelet_say(judge: Any) -> None:
    message = record("ValueError: bad batch", 3, ["Traceback", "ValueError: bad batch"]) + RAISED
    [loss] = judge(failed(1, message))
    assert (loss.exit_code, loss.detail) == (3, "ValueError: bad batch")
    assert loss.log_lines == ("Traceback", "ValueError: bad batch")


def test_of_several_processes_in_one_pod_the_one_that_blames_no_peer_is_believed(judge: Any) -> None:
    message = record("RuntimeError: Connection reset by peer") + record("ValueError: bad batch", 3)
    [loss] = judge(failed(1, message))
    assert (loss.cause, loss.exit_code) == (Cause.ERROR, 3)


@pytest.mark.parametrize("code", [1, 143, 137])
def test_program_that_ends_after_its_pod_was_deleted_is_not_to_blame(judge: Any, code: int) -> None:
    """torchrun answers the kubelet's SIGTERM with exit code 1; a late operator sees both at once."""
    [loss] = judge(failed(code, at=2, deleted_at=NOW))
    assert loss.cause is Cause.POD_DELETED


def test_program_that_had_failed_before_its_pod_was_deleted_is_to_blame(judge: Any) -> None:
    [loss] = judge(failed(1, RAISED, at=-3, deleted_at=NOW))
    assert loss.cause is Cause.ERROR


@pytest.mark.parametrize(("code", "shown"), [(-1, 0), (256, 255), (3221225786, 255)])
def test_exit_code_out_of_range_is_kept_within_what_a_status_holds(judge: Any, code: int, shown: int) -> None:
    [loss] = judge(failed(code))
    assert loss.exit_code == shown


@pytest.mark.parametrize(
    "message",
    [
        '{"everstep":1}',
        '{"everstep":1,"exit_code":"x","error":"e"}',
        '{"everstep":1,"exit_code":1e999,"error":"e"}',
        '{"everstep":1,"exit_code":null,"error":"e"}',
        '{"everstep":1,"exit_code":1,"error":"e","lines":7}',
        '{"everstep"' + "[" * 3000,
    ],
)
def test_record_that_is_not_one_is_taken_as_plain_log(judge: Any, message: str) -> None:
    [loss] = judge(failed(7, message))
    assert (loss.exit_code, loss.cause) == (7, Cause.ERROR)
    assert loss.log_lines == (message[:500],)


def test_log_lines_are_few_short_and_without_credentials(judge: Any) -> None:
    log = "\n".join([f"line {n}" for n in range(50)] + ["password=hunter2 " + "x" * 5000, "token=a;" * 200])
    [loss] = judge(failed(1, log))
    assert len(loss.log_lines) == 20
    assert all(len(line) <= 500 for line in loss.log_lines)
    assert "hunter2" not in str(loss.log_lines)
