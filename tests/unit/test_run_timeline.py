"""From a run's history to lanes, bands and a drawing: known answers, and nothing that the history does not say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.jobs.drawing import draw, text
from everstep.jobs.history import (
    ActionTaken,
    Entry,
    EventSeen,
    History,
    HistoryError,
    PodSeen,
    StatusSeen,
    StepSeen,
    decode,
    encode,
)
from everstep.jobs.timeline import Segment, Span, State, build, since

KILLED: list[Entry] = [
    StatusSeen(0.0, "Pending", "creating 2 workers", 1, 2),
    PodSeen(0.1, "j-w0-0", 0, 1, "n1", "Pending"),
    PodSeen(0.1, "j-w1-0", 1, 1, "n2", "Pending"),
    PodSeen(0.2, "j-w0-0", 0, 1, "n1", "Running"),
    StepSeen(3.0, "j-w0-0", 0, 0, 2, 1, 2.0, 1),
    StepSeen(3.1, "j-w1-0", 1, 1, 2, 1, round=1),
    StatusSeen(3.2, "Running", "2/2 ready", 1, 2, 20),
    ActionTaken(5.0, "kill j-w1-0", 1),
    PodSeen(5.1, "j-w1-0", 1, 1, "n2", "Failed"),
    StatusSeen(5.2, "Recovering", "worker 1 lost", 2, 2, 20),
    EventSeen(5.2, "Warning", "WorkerLost", "worker 1 lost"),
    StepSeen(5.3, "j-w0-0", 0, 0, 2, 30, 1.5, 1),  # still of the old world
    PodSeen(5.4, "j-w0-0", 0, 1, "n1", "Deleted"),
    PodSeen(5.4, "j-w0-1", 0, 2, "n1", "Pending"),
    PodSeen(5.4, "j-w1-1", 1, 2, "n2", "Pending"),
    StepSeen(9.0, "j-w1-1", 1, 0, 2, 31, 1.4, 2),
    StepSeen(9.2, "j-w0-1", 0, 1, 2, 31, round=2),
    PodSeen(12.0, "j-w0-1", 0, 2, "n1", "Succeeded"),
    PodSeen(12.0, "j-w1-1", 1, 2, "n2", "Succeeded"),
    StatusSeen(12.1, "Complete", "all 2 workers succeeded", 2, 2, 60),
]


def test_killed_worker_has_a_lane_of_four_parts() -> None:
    timeline = build(KILLED)
    assert timeline.lanes[1] == (
        Segment(0.1, 3.1, State.STARTING, "j-w1-0"),
        Segment(3.1, 5.1, State.TRAINING, "j-w1-0", "Failed"),
        Segment(5.4, 9.0, State.STARTING, "j-w1-1"),
        Segment(9.0, 12.0, State.TRAINING, "j-w1-1", "Succeeded"),
    )
    assert timeline.outcome == "Complete"


def test_recovery_ends_with_the_first_step_of_the_new_world() -> None:
    assert build(KILLED).spans == (Span(5.2, 9.0, "Recovering"),)


def test_recovery_of_survivors_that_keep_their_pods_ends_with_their_first_step_of_the_next_round() -> None:
    entries: list[Entry] = [
        StepSeen(3.0, "j-w0-0", 0, 0, 3, 7, round=4),
        StatusSeen(5.2, "Recovering", "worker 1 lost", 4, 3),
        StepSeen(5.3, "j-w0-0", 0, 0, 3, 8, round=4),  # still of the old world
        StepSeen(5.5, "j-w0-0", 0, 0, 2, 9, round=5),
    ]
    assert build(entries).spans == (Span(5.2, 5.5, "Recovering"),)
    quick = [StepSeen(5.1, "j-w0-0", 0, 0, 2, 8, round=5), entries[1], StepSeen(5.3, "j-w0-0", 0, 0, 2, 9, round=5)]
    assert build(quick).spans == (Span(5.2, 5.3, "Recovering"),), "they were quicker than the status"


def test_survivors_that_train_on_stand_still_only_between_two_rounds() -> None:
    def step(at: float, number: int, round: int) -> StepSeen:
        return StepSeen(at, "j-w0-0", 0, 0, 3, number, round=round)

    status = StatusSeen(5.2, "Resizing", "resizing from 3 to 4 workers", 4, 3)
    trains_on: list[Any] = [step(5.0, 7, 4), status, step(5.4, 8, 4), step(6.4, 18, 4), step(7.4, 28, 4)]
    assert build([*trains_on, step(7.6, 29, 5)]).spans == (Span(7.4, 7.6, "Resizing"),)
    assert build(trains_on).spans == (), "it ended before anybody came"


def test_loss_is_that_of_rank_0_wherever_it_runs() -> None:
    assert build(KILLED).loss == ((3.0, 1, 2.0), (5.3, 30, 1.5), (9.0, 31, 1.4))


def test_world_and_commits_are_told_only_when_they_change() -> None:
    timeline = build(KILLED)
    assert timeline.world == ((0.0, 2),)
    assert timeline.commits == ((3.2, 20), (12.1, 60))


def test_world_that_never_steps_again_stands_still_to_the_end() -> None:
    timeline = build([*KILLED[:10], PodSeen(60.0, "j-w0-0", 0, 1, "n1", "Deleted")])
    assert timeline.spans == (Span(5.2, 60.0, "Recovering"),)


def test_empty_history_gives_an_empty_timeline_and_a_drawing() -> None:
    timeline = build([])
    assert (timeline.lanes, timeline.seconds) == ({}, 0.0)
    ElementTree.fromstring(draw(timeline, "nothing"))


def test_drawing_is_xml_with_a_lane_a_worker_and_what_was_done() -> None:
    root = ElementTree.fromstring(draw(build(KILLED), 'a <title> & "more"'))
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == 'a <title> & "more"'
    assert {"worker 0", "worker 1", "kill j-w1-0", "Recovering 3.8 s"} <= set(words)


def test_labels_of_close_recoveries_stand_apart_and_inside_of_the_drawing() -> None:
    spans = tuple(Span(at, at + 0.5, "Recovering") for at in (10.0, 10.6, 59.0, 59.5))
    timeline = replace(build([]), seconds=60.0, spans=spans)
    root = ElementTree.fromstring(draw(timeline, "t"))
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    labels = [n for n in texts if (n.text or "").startswith("Recovering")]
    boxes = [(float(n.get("x", "")) - 7 * len(n.text or "") / 2, float(n.get("y", "")), n.text) for n in labels]
    assert len({(x, y) for x, y, _ in boxes}) == 4
    for x, y, words in boxes:
        right = x + 7 * len(words or "")
        assert 0 <= x < right <= 960
        assert not [other for other, row, _ in boxes if row == y and x < other < right]
    assert "nothing logs a loss" in [n.text for n in texts]


def test_part_of_a_timeline_begins_with_what_goes_on_from_before() -> None:
    part = since(build(KILLED), 6.0)
    assert part.lanes[1] == (
        Segment(6.0, 9.0, State.STARTING, "j-w1-1"),
        Segment(9.0, 12.0, State.TRAINING, "j-w1-1", "Succeeded"),
    )
    assert part.spans == (Span(6.0, 9.0, "Recovering"),)
    assert (part.actions, part.world, part.loss) == ((), ((6.0, 2),), ((9.0, 31, 1.4),))
    drawn = ElementTree.fromstring(draw(part, "t"))
    words = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"6 s", "12 s", "worker 1"} <= set(words)
    assert not {"0 s", "kill j-w1-0"} & set(words)
    assert text(part, 40).splitlines()[2].split() == ["6", "s", "12.1", "s"]
    assert since(build(KILLED), 0.0) == build(KILLED)


def test_text_marks_the_death_and_lists_what_was_done() -> None:
    lines = text(build(KILLED), 40).splitlines()
    assert lines[0].startswith("worker 0")
    assert "✗" in lines[1]
    assert "     5.0 s  kill j-w1-0" in lines
    assert "     5.2 s  Recovering: no step for 3.8 s" in lines


def test_history_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    History(KILLED).save(path)
    assert list(History.load(path)) == KILLED
    assert len(path.read_text().splitlines()) == len(KILLED)


def test_repeated_report_of_a_step_is_kept_once() -> None:
    history = History()
    for at in (1.0, 1.5, 2.0):
        history.add(StepSeen(at, "p", 0, 0, 1, 7))
    history.add(StepSeen(2.5, "p", 0, 0, 1, 8))
    assert [e.at for e in history] == [1.0, 2.5]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"kind":"pod"}', '{"kind":"no"}', "nonsense"])
def test_line_that_is_no_entry_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(encode(KILLED[0]) + "\n" + line + "\n")
    with pytest.raises(HistoryError, match=r"history\.jsonl:2"):
        History.load(path)


ENTRIES = st.one_of(
    st.builds(PodSeen, st.floats(0, 100), st.sampled_from(["j-w0-0", "j-w0-1"]), st.just(0), st.integers(1, 2),
              st.just("n"), st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Deleted"])),
    st.builds(StepSeen, st.floats(0, 100), st.sampled_from(["j-w0-0", "j-w0-1", "x"]), st.just(0), st.integers(0, 1),
              st.just(2), st.integers(0, 9), st.none() | st.floats(-1, 10)),
    st.builds(StatusSeen, st.floats(0, 100), st.sampled_from(["Running", "Recovering", "Suspended"]), st.just(""),
              st.integers(0, 3), st.integers(0, 4), st.none() | st.integers(0, 9)),
    st.builds(ActionTaken, st.floats(0, 100), st.text(max_size=5), st.none()),
)  # fmt: skip


@given(st.lists(ENTRIES, max_size=30))
def test_any_history_has_ordered_lanes_and_a_drawing_that_is_xml(entries: list[Entry]) -> None:
    entries = sorted((decode(encode(e)) for e in entries), key=lambda e: e.at)
    timeline = build(entries)
    for segments in timeline.lanes.values():
        assert all(0 <= s.begin <= s.end <= timeline.seconds for s in segments)
    for span in timeline.spans:
        assert span.begin <= span.end <= timeline.seconds
    root = ElementTree.fromstring(draw(timeline, "t").encode("utf-8", "replace"))
    assert root.tag.endswith("svg")
    assert json.loads(json.dumps(text(timeline)))
