"""Processes that agents replace by themselves: what an agent writes of their end, and what the operator reads of it."""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from everstep.agent.processes.faults import judge
from everstep.contract import process_end
from everstep.contract.document import Document, Member, Sizes
from everstep.contract.process_end import Replaced
from everstep.membership.commands import Break, Charge, Command, Evict, Withdraw
from everstep.membership.machine import Rejected, apply
from everstep_operator.round_view import ProcessEnd, RoundView
from everstep_operator.rounds.process_ends import MAX_ENDS, ProcessEnds

START = datetime(2026, 1, 1, tzinfo=UTC)
MEMBERS = tuple(Member(i, f"a-{i}", incarnation=i) for i in range(3))
KILLED = process_end.of_rank(1, "SIGKILL")


def written(code: int, tmp_path: Path, *, out_of_memory: bool = False) -> str:
    """What the agent of this release writes of a process of rank 7 that ended so."""
    return process_end.of_rank(7, judge(code, tmp_path / "none", out_of_memory)[1])


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_kill_from_outside_is_read_as_the_agent_writes_it(name: str, tmp_path: Path) -> None:
    text = written(-signal.Signals[name], tmp_path)
    assert process_end.read(text) == Replaced(f"rank 7 was killed ({name})", 0.0)


@pytest.mark.parametrize("code", [1, 77, -signal.SIGSEGV, -signal.SIGABRT])
def test_end_after_which_the_pod_may_end_too_is_not_read(code: int, tmp_path: Path) -> None:
    assert process_end.read(written(code, tmp_path)) is None


def test_process_that_the_kernel_killed_for_memory_is_the_programs_own_fault(tmp_path: Path) -> None:
    assert process_end.read(written(-signal.SIGKILL, tmp_path, out_of_memory=True)) is None


def test_hang_is_read_with_the_time_for_which_it_stood() -> None:
    text = process_end.of_rank(3, process_end.hung(12, 299.6, " at train.py:31 in forward")) + "; stacks in /tmp/x"
    detail = "rank 3 made no progress in step 12 for 300 s at train.py:31 in forward"
    assert process_end.read(text) == Replaced(detail, 300.0)
    assert process_end.read(process_end.of_rank(3, process_end.hung(None, 60, ""))) == Replaced(
        "rank 3 made no progress in step None for 60 s", 60.0
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "its lease expired",
        "rank x: SIGKILL",
        "rank 1: SIGKILLED",
        "rank 99999999: SIGKILL",
        "rank 1: no progress in step 3 for " + "9" * 400 + " s",
        "a process ended",
    ],
)
def test_other_text_is_no_end_that_is_reported(text: str) -> None:
    assert process_end.read(text) is None


def after(document: Document, command: Command) -> Document:
    changed = apply(document, command)
    assert not isinstance(changed, Rejected), changed
    return changed


def round_of(number: int) -> Document:
    return Document(Sizes(1, 3), round=number, members=MEMBERS)


def ends(*documents: Document | None) -> tuple[ProcessEnd, ...]:
    seen, before = ProcessEnds(), None
    for second, now in enumerate(documents):
        seen.see(before, now, START + timedelta(seconds=second))
        before = now
    return seen.added_to(RoundView(0)).ends


@pytest.mark.parametrize("command", [Withdraw("a-1", 4, KILLED), Break("a-1", 4, KILLED)])
def test_process_that_ended_a_round_is_named_with_its_worker_and_the_time(command: Command) -> None:
    whole = round_of(4)
    assert ends(whole, after(whole, command)) == (
        ProcessEnd(4, 1, 1, START + timedelta(seconds=1), "rank 1 was killed (SIGKILL)", 0.0),
    )


def test_others_of_the_same_round_are_counted_and_not_listed() -> None:
    whole = round_of(4)
    first = after(whole, Withdraw("a-1", 4, KILLED))
    second = after(first, Withdraw("a-2", 4, process_end.of_rank(2, "SIGKILL")))
    (end,) = ends(whole, first, second)
    assert (end.index, end.more, end.at) == (1, 1, START + timedelta(seconds=1))
    (end,) = ends(whole, second)  # both in one look
    assert (end.index, end.more) == (1, 1)


def test_what_ended_before_this_leader_read_the_document_is_not_reported() -> None:
    whole = round_of(4)
    assert ends(after(whole, Withdraw("a-1", 4, KILLED))) == ()
    assert ends(None, after(whole, Withdraw("a-1", 4, KILLED))) == ()


def test_agent_that_was_taken_out_or_whose_program_failed_is_no_such_end() -> None:
    whole = round_of(4)
    evicted = after(whole, Evict("a-0", 4, "a-1", "its address refuses connections"))
    assert ends(whole, evicted) == ()
    failed = after(whole, Withdraw("a-1", 4, "rank 1: exit code 1: ValueError: no"))
    assert ends(whole, failed, after(failed, Charge("a-1", 4, "rank 1: exit code 1: ValueError: no"))) == ()


def test_only_the_newest_are_kept() -> None:
    documents = []
    for number in range(1, MAX_ENDS + 5):
        documents += [round_of(number), after(round_of(number), Withdraw("a-1", number, KILLED))]
    assert [end.round for end in ends(*documents)] == list(range(5, MAX_ENDS + 5))
