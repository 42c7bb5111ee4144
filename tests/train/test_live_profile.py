"""What a person hears who asks for a profile while another one goes on, or when no further step comes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from everstep.instruments.live_profile import LiveProfile

SECONDS = 60


class Asker:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._answered = threading.Event()

    def __call__(self, **found: Any) -> None:
        assert not self._answered.is_set(), "each request is answered once"
        self.found = found
        self._answered.set()

    def wait(self) -> dict[str, Any]:
        assert self._answered.wait(SECONDS)
        return self.found


class Traces(dict[str, bytes]):
    def put(self, name: str, data: bytes) -> str:
        self[name] = data
        return f"memory/{name}"


def train(live: LiveProfile, steps: range) -> None:
    """As a loop does that counts steps."""
    for step in steps:
        if live.request_id is not None:
            live.step_begins(step, 1)
        torch.ones(8, 8) @ torch.ones(8, 8)


def test_profile_that_is_asked_for_twice_is_made_once_and_the_second_asker_hears_of_the_first() -> None:
    traces, first, second, third = Traces(), Asker(), Asker(), Asker()
    live = LiveProfile(traces.put)
    live.ask("one", 3, first)
    train(live, range(5, 7))
    live.ask("two", 3, second)
    assert "profile one goes on in this process, with 2 of its 3 steps to come" in second.wait()["error"]
    train(live, range(7, 20))
    found = first.wait()
    assert {k: found[k] for k in ("rank", "first", "last", "steps", "left_out")} == {
        "rank": 1, "first": 5, "last": 8, "steps": 3, "left_out": 0,
    }  # fmt: skip
    assert list(traces) == ["profiles/one/rank-1.json.gz"]
    live.ask("three", 1, third)
    train(live, range(20, 22))
    assert third.wait()["first"] == 20


def test_training_that_ends_before_the_profiles_steps_leaves_a_profile_of_fewer() -> None:
    live, asker = LiveProfile(Traces().put), Asker()
    live.ask("one", 100, asker)
    train(live, range(3))
    live.close()
    found = asker.wait()
    assert (found["first"], found["last"], found["steps"]) == (0, 3, 3)


def test_training_that_ends_before_the_next_step_answers_whoever_waits_and_whoever_asks_later() -> None:
    live, waits, late = LiveProfile(Traces().put), Asker(), Asker()
    live.ask("one", 100, waits)
    live.close()
    assert "the training was over before its next step began" in waits.wait()["error"]
    live.ask("two", 100, late)
    assert "the training in this process is over" in late.wait()["error"]


def test_run_without_storage_and_a_profiler_of_the_scripts_own_are_told_and_stop_no_training() -> None:
    asker, other = Asker(), Asker()
    LiveProfile(None).ask("one", 1, asker)
    assert "no checkpoint URL" in asker.wait()["error"]
    live = LiveProfile(Traces().put)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        live.ask("one", 1, other)
        train(live, range(4))
    assert "the script has a profiler of its own" in other.wait()["error"]
    assert live.request_id is None
    assert "aten::mm" in {event.name for event in own.events() or ()}, "the script's own profile is whole"


def test_storage_that_takes_no_trace_is_told() -> None:
    def full(name: str, data: bytes) -> str:
        raise OSError("no space left")

    live, asker = LiveProfile(full), Asker()
    live.ask("one", 1, asker)
    train(live, range(3))
    assert asker.wait()["error"] == "OSError: no space left"
