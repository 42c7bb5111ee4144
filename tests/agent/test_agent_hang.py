"""Which process hangs, and that it is the one that is replaced (failure modes 62 and 64)."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.agent.decide.stall import ASK_SECONDS, FACTOR, FIRST_FACTOR, Finding, Watch, look
from everstep.contract.calls import Call, StepStatus
from support.agent.agent_job import HERE, Job


def looks(watch: Watch, *answers: StepStatus | None, every: float = ASK_SECONDS) -> list[Finding]:
    now, seen = watch.looked, []
    for answer in answers:
        now += every
        watch, found = look(watch, answer, now)
        seen.append(found)
    return seen


def test_a_step_that_takes_longer_than_the_floor_hangs() -> None:
    assert looks(Watch(2.5), *[StepStatus(7, False, 0.1)] * 5) == [Finding.GOES_ON] * 3 + [Finding.HANGS] * 2


def test_a_process_that_waits_for_others_is_not_to_blame() -> None:
    assert looks(Watch(2.5), *[StepStatus(7, True, 0.1)] * 5) == [Finding.GOES_ON] * 3 + [Finding.WAITS] * 2


def test_a_process_that_waits_between_two_steps_waits_and_does_not_hang() -> None:
    assert looks(Watch(2.5), *[StepStatus(None, True, 0.1)] * 5)[-1] is Finding.WAITS
    assert looks(Watch(2.5), *[StepStatus(None, True, 0.1)] * 5, *[None] * 5)[-1] is Finding.GOES_ON


def test_steps_that_are_slow_anyway_may_take_longer() -> None:
    slow = StepStatus(7, False, 1.0)
    assert Finding.HANGS not in looks(Watch(2.5), *[slow] * int(FACTOR))
    assert looks(Watch(2.5), *[slow] * (int(FACTOR) + 2))[-1] is Finding.HANGS


def test_a_first_step_may_take_much_longer_because_it_compiles() -> None:
    first = StepStatus(0, False, 0.0)
    assert Finding.HANGS not in looks(Watch(2.5), *[first] * int(FIRST_FACTOR * 2.5))
    assert looks(Watch(2.5), *[first] * (int(FIRST_FACTOR * 2.5) + 2))[-1] is Finding.HANGS


def test_slow_steps_do_not_raise_a_limit_that_is_fixed() -> None:
    slow = StepStatus(7, False, 100.0)
    assert looks(Watch(2.5, factor=0), *[slow] * 4) == [Finding.GOES_ON] * 3 + [Finding.HANGS]


def test_progress_and_the_time_between_two_steps_begin_the_count_anew() -> None:
    steps = [StepStatus(step, False, 0.1) for step in range(20)]
    assert Finding.HANGS not in looks(Watch(2.5), *(one for step in steps for one in (step, step)))
    assert Finding.HANGS not in looks(Watch(2.5), *[StepStatus(None, False, 0.1)] * 20)


def test_a_long_step_whose_collectives_go_on_is_no_hang() -> None:
    calls = [Call(n, "barrier()") for n in range(1, 40)]
    busy = [StepStatus(7, n % 2 == 0, 0.1, call if n % 2 == 0 else None, (call,)) for n, call in enumerate(calls)]
    assert set(looks(Watch(2.5), *busy)) == {Finding.GOES_ON}


def test_a_process_that_answers_nothing_in_a_step_hangs_and_between_two_does_not() -> None:
    assert looks(Watch(2.5), StepStatus(7, False, 0.1), None, None, None)[-1] is Finding.HANGS
    assert Finding.HANGS not in looks(Watch(2.5), StepStatus(None, False, 0.1), *[None] * 20)


def test_an_agent_that_was_stopped_does_not_count_the_time_that_it_did_not_look() -> None:
    watch, _ = look(Watch(10), StepStatus(7, False, 0.1), 1.0)
    assert look(watch, None, 1000.0)[1] is Finding.GOES_ON


@pytest.mark.timeout(180)
def test_the_rank_that_does_not_arrive_is_named_with_its_line_and_replaced_while_the_others_go_on(
    job: Callable[..., Job], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Short, as where programs run: what others are told has a bound.
    stacks = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(stacks))
    environ = {"EVERSTEP_HANG_SECONDS": "3", "TMPDIR": str(stacks)}
    run = job(HERE / "hang_script.py", tmp_path, environ=environ)
    agents = run.start(3)
    began = time.monotonic()
    run.world(agents, began)
    before = {agent.number: agent.trainers() for agent in agents}
    (tmp_path / "hang").write_text("1")
    hung = run.until(
        lambda: next((a for a in agents if "the others wait for it" in a.log.read_text()), None), "no hang"
    )
    since = time.monotonic()
    others = [a for a in agents if a is not hung]
    run.world(agents, since)
    assert {a.number: a.trainers() for a in others} == {a.number: before[a.number] for a in others}
    assert hung.trainers() != before[hung.number]
    said = hung.log.read_text()
    assert "at hang_script.py:" in said
    assert "in stuck" in said
    assert "the others wait for it" in said
    for agent in others:
        assert "the others wait for it" not in agent.log.read_text()
        assert "is gone: rank 1: no progress in step" in agent.log.read_text(), "the others are told why"
    kept = list(stacks.glob("everstep-stacks-*/*/*.txt"))
    assert {p.name.rpartition("-")[2] for p in kept} == {"0.txt", "1.txt", "2.txt"}, "the stacks of every rank"
    assert any("in stuck" in p.read_text() for p in kept if p.name.endswith("rank-1.txt"))
    assert f"; stacks in {stacks}/everstep-stacks-" in others[0].log.read_text(), "and the others are told where"
