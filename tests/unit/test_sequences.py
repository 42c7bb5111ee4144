"""The random sequences and the table of restarts say only what can be done: read by rules of their own."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.scenarios import rows
from support.scenarios.lines import Asked
from support.scenarios.sequences import EACH_TIME, KINDS, MOST, Place, sequence

places = st.builds(Place, st.integers(1, 5), st.booleans(), st.booleans())
seeds = st.integers(0, 10**9)
AWAY = ("kill-node", "pause-node", "drain-node")


def words_of(text: str) -> list[list[str]]:
    found = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words[1:] if words[0] == "maybe" else words for words in found if words]


@given(seeds, places)
def test_sequence_suspends_resumes_and_takes_nodes_only_where_that_can_be(seed: int, place: Place) -> None:
    suspended, limited, away, kind = False, False, 0, KINDS[seed % len(KINDS)]
    job, *lines = words_of(sequence(seed, place))
    workers = Asked.parse(job[1:]).workers
    assert 1 <= workers <= MOST
    for words in lines:
        match words:
            case ["suspend"]:
                assert not suspended
                suspended = True
            case ["resume"]:
                assert suspended
                suspended = False
            case [verb, number] if verb in AWAY:
                away += 1
                assert 1 <= int(number) <= place.nodes
                assert away < place.nodes, "no node is left"
            case ["flap-node", number]:
                assert not away, "it brings all nodes back"
                assert 1 <= int(number) <= place.nodes
            case ["quota", number]:
                assert place.quota
                assert not limited
                assert int(number) >= 1
                limited = True
            case ["no-quota"]:
                assert limited
                limited = False
            case ["start-nodes"]:
                assert away
                away = 0
            case ["scale", number]:
                assert kind.resizes
                assert 1 <= int(number) <= MOST
                assert int(number) != workers
                workers = int(number)
            case ["delete-pod" | "kill-process", *which] if which != ["all"]:
                assert not suspended, "there is no such worker"
                assert which
                assert all(0 <= int(one) < workers for one in which)
            case ["until", "further", _]:
                assert not suspended, "no step will come"
                assert not limited, "none may come"
            case ["restart-store"]:
                assert place.store
            case ["wait", seconds]:
                assert 0 <= float(seconds) <= 6
            case _:
                pass
    assert not suspended
    assert not limited
    assert not away
    assert lines[-2:] == [["until", "complete"], ["expect", "outcome"]]


@given(seeds, places)
def test_same_seed_in_the_same_place_gives_the_same_text(seed: int, place: Place) -> None:
    assert sequence(seed, place) == sequence(seed, place)


@given(seeds, places)
def test_job_has_steps_left_for_every_moment_of_its_sequence(seed: int, place: Place) -> None:
    job, *lines = words_of(sequence(seed, place))
    asked = Asked.parse(job[1:])
    seconds = sum(float(words[1]) for words in lines[:-4] if words[0] == "wait")
    steps = sum(int(words[2]) for words in lines if words[:2] == ["until", "further"])
    assert asked.steps > seconds / asked.pause + steps


ALL_EVENTS = {
    "delete-pod", "kill-process", "scale", "suspend", "resume", "drain-node", "kill-node", "pause-node", "start-nodes",
    "flap-node", "kill-operator", "restart-store",
}  # fmt: skip


def test_seeds_of_each_time_have_every_event_and_both_launchers() -> None:
    texts = [words_of(sequence(seed, Place(2, store=True))) for seed in EACH_TIME]
    assert {words[0] for text in texts for words in text} >= ALL_EVENTS
    assert {word for text in texts for word in text[0] if word.startswith("launcher=")} == {
        "launcher=everstep-run", "launcher=torchrun",
    }  # fmt: skip


def test_fifty_seeds_have_every_kind_of_job_and_every_event() -> None:
    texts = [words_of(sequence(seed, Place(2, store=True))) for seed in range(50)]
    assert {" ".join(text[0][5:8]) for text in texts} == {
        f"script={k.script} launcher={k.launcher} backend={k.backend}" for k in KINDS
    }
    assert {word for text in texts for word in text[0] if word.startswith("spares=")} == {"spares=1"}
    with_quota = [words_of(sequence(seed, Place(2, store=True, quota=True))) for seed in range(50)]
    assert {words[0] for text in with_quota for words in text} >= ALL_EVENTS | {"quota", "no-quota"}
    assert {words[0] for text in texts for words in text} >= ALL_EVENTS
    deleted = {
        len(words) - 1 if words[1] != "all" else 0 for text in texts for words in text if words[0] == "delete-pod"
    }
    assert deleted >= {0, 1, 2}, "one, some and all"


@pytest.mark.parametrize("row", rows.ROWS, ids=str)
def test_every_row_is_a_text_whose_job_can_be_asked_for(row: rows.Row) -> None:
    (job,) = [words for words in words_of(row.text()) if words[0] == "job"]
    asked = Asked.parse(job[1:])
    assert asked.launcher == rows.LAUNCHERS[row.launcher].command
    assert ["lose-processes", "5"] in words_of(row.text())
    # torchrun counts what was killed, and what was killed in another pod: once each in five losses and the fault.
    assert asked.restarts is None if asked.launcher == "everstep-run" else (asked.restarts or 0) > 2 * 6
    assert asked.together == (row.fault == "node-of-all")
    assert (asked.every < asked.steps) == row.committed
