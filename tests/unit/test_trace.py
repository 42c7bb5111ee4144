"""Communication, overlap and waiting for data, from traces that are small enough to be judged by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.instruments.live_profile import INPUT, MOVED, STEP, NoSteps, common, summarize, union


def event(name: str, begin: float, end: float, cat: str = "user_annotation", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "tid": tid}


def test_cpu_step_whose_collective_is_half_behind_the_backward_pass() -> None:
    found = summarize(
        [
            event(STEP, 0, 100), event(STEP, 100, 200), {"ph": "i", "name": "mark", "ts": 3},
            event(INPUT, 0, 10), event(INPUT, 100, 110),
            event("aten::mm", 20, 60, "cpu_op"), event("aten::add", 30, 40, "cpu_op"),
            event("c10d::allreduce_", 50, 90, "cpu_op"),
            event("gloo:all_reduce", 40, 80), event("gloo:all_reduce", 150, 160),
            event("gloo:all_reduce", 300, 900),
        ]
    )  # fmt: skip
    assert found.steps == 2
    assert found.step_seconds == pytest.approx(100e-6)
    assert found.input == pytest.approx(0.1)
    assert found.communication == pytest.approx(0.25), "what is outside of the steps does not count"
    assert found.overlap == pytest.approx(20 / 50), "a collective's own operator is not computation"
    assert found.exposed == pytest.approx(30 / 200)


def test_accelerator_is_judged_by_its_kernels_and_not_by_what_the_host_does() -> None:
    found = summarize(
        [
            event(STEP, 0, 100), event("aten::mm", 0, 100, "cpu_op"), event("nccl:all_reduce", 0, 100),
            event("gemm", 10, 50, "kernel"), event("ncclDevKernel_AllReduce_Sum", 40, 60, "kernel"),
        ]
    )  # fmt: skip
    assert found.communication == pytest.approx(0.2)
    assert found.overlap == pytest.approx(0.5)


def test_rank_that_talks_to_nobody_has_no_overlap_and_without_a_known_loader_no_input() -> None:
    found = summarize([event(STEP, 0, 10)])
    assert (found.communication, found.overlap, found.exposed, found.input) == (0, None, 0, None)


def test_waits_for_torchs_loader_count_in_the_thread_that_trains() -> None:
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    found = summarize([event(STEP, 0, 100), event(name, 10, 30), event(name, 0, 90, tid=2), event(INPUT, 5, 15)])
    assert found.input == pytest.approx(0.25)
    assert summarize([event(STEP, 0, 100), event(name, 0, 90, tid=2)]).input is None


def test_step_in_which_the_world_has_changed_is_left_out_and_counted() -> None:
    steps = [event(STEP, 0, 100), event(STEP, 100, 9100), event(STEP, 9100, 9200)]
    found = summarize([*steps, event(MOVED, 150, 150), event("gloo:all_reduce", 10, 60)])
    assert (found.steps, found.left_out) == (2, 1)
    assert found.step_seconds == pytest.approx(100e-6)
    assert found.communication == pytest.approx(0.25)
    with pytest.raises(NoSteps, match="the world has changed in each of its steps"):
        summarize([steps[1], event(MOVED, 150, 150)])


def test_annotations_copy_on_an_accelerators_time_line_is_no_step() -> None:
    found = summarize([event(STEP, 0, 100), event(STEP, 20, 130, "gpu_user_annotation", tid=7)])
    assert found.steps == 1
    assert found.step_seconds == pytest.approx(100e-6)


def test_trace_without_a_step_is_refused_by_name() -> None:
    with pytest.raises(NoSteps, match="no step"):
        summarize([event("aten::mm", 0, 1, "cpu_op")])


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda t: (min(t), max(t))), max_size=8)


@given(intervals, intervals)
def test_unions_and_what_they_have_in_common_are_those_of_the_moments_in_them(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    def moments(found: Any) -> set[int]:
        return {at for begin, end in found for at in range(int(begin), int(end))}

    a, b = union(some), union(others)
    assert moments(a) == moments(some)
    assert all(end < begin for (_, end), (begin, _) in pairwise(a))
    assert moments(common(a, b)) == moments(some) & moments(others)
