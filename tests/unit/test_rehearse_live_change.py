"""What a rehearsal says of processes that go on when the number of ranks changes, from records alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.rehearse.findings import Finding, Kind, find, left_out
from everstep.rehearse.plan import LIVE_STEPS, Scenario, calm, scenarios
from everstep.rehearse.play import Played
from everstep.rehearse.record import BUFFERS, Record, Steps

RANKS, STEPS, COMMITS = 3, 40, (7, 14, 21, 28, 35, 40)
AGAIN, MORE, FEWER = scenarios(RANKS, STEPS, ("size",), commits=COMMITS)


def steps(world: int, first: int, last: int) -> Steps:
    return {
        (rank, step): Record(
            step, rank, world, 1, float(step), {"model": f"m{step} of {world}", f"{BUFFERS}model": f"{rank}"},
            {"ranks": str(world), "k": str(step)}, [f"{step}-{i}" for i in range(rank, 12, world)],
        )
        for rank in range(world) for step in range(first, last + 1)
    }  # fmt: skip


def played(scenario: Scenario) -> Played:
    change, size = scenario.change, scenario.sizes[-1]
    if change is None:
        return Played(scenario, steps(RANKS, 1, STEPS), 0, 1.0, 0, "")
    kept = {**steps(RANKS, 1, change.step), **steps(size, change.step + 1, STEPS)}
    live = steps(change.size, change.step + 1, scenario.kills[0].step)
    return Played(scenario, kept, 0, 1.0, size, "", live=live)


def changed(run: Played, first: int, **values: object) -> Played:
    """The steps behind the live change from this one on."""
    live = {key: replace(r, **values) if key[1] >= first else r for key, r in run.live.items()}  # type: ignore[arg-type]
    return replace(run, live=live)


CALM = played(calm(RANKS, STEPS))
RIGHT = [CALM, *map(played, (AGAIN, MORE, FEWER))]


def only(more: Played) -> Finding:
    (finding,) = find([*RIGHT[:2], more, RIGHT[3]])
    return finding


@pytest.mark.parametrize(
    ("total", "commits", "step", "end"),
    [(40, COMMITS, 14, 20), (12, (5, 10, 12), 5, 8), (40, (10, 20, 30, 40), 10, 19), (40, (30,), 30, 33)],
)
def test_change_is_behind_a_commit_and_all_end_before_the_next(
    total: int, commits: tuple[int, ...], step: int, end: int
) -> None:
    _, more, fewer = scenarios(RANKS, total, ("size",), commits=commits)
    assert [one.change.step for one in (more, fewer) if one.change is not None] == [step, step]
    assert [one.kills[0].step for one in (more, fewer)] == [end, end]
    assert [(one.sizes[-1], one.change.size, one.kills[0].ranks) for one in (more, fewer) if one.change] == [
        (4, 2, (0, 1, 2)), (2, 4, (0, 1, 2, 3)),
    ]  # fmt: skip


@pytest.mark.parametrize("commits", [(), range(1, 41), range(0, 41, LIVE_STEPS)], ids=["none", "each step", "close"])
def test_without_commits_that_are_apart_no_process_goes_on(commits: tuple[int, ...]) -> None:
    _, more, _ = scenarios(RANKS, 12 if not commits else 40, ("size",), commits=commits)
    assert (more.change, more.kills[0].step) == (None, 6 if not commits else 20)


def test_processes_that_go_on_as_new_ones_would_give_no_finding() -> None:
    assert (find(RIGHT), left_out(RIGHT)) == ([], "")
    apart = changed(RIGHT[2], 0, tracked={"model": "m", f"{BUFFERS}model": "another"})
    same_model = {
        key: replace(r, tracked=r.tracked | {f"{BUFFERS}model": "another"}) for key, r in RIGHT[2].live.items()
    }
    assert find([*RIGHT[:2], replace(RIGHT[2], live=same_model), RIGHT[3]]) == []
    assert find([*RIGHT[:2], apart, RIGHT[3]]) != []


def test_value_of_the_former_size_is_named_with_the_step_from_which_training_differs() -> None:
    stale = changed(RIGHT[2], 0, held={"ranks": "3", "k": "0"})
    assert find([*RIGHT[:2], stale, RIGHT[3]]) == [], "nothing was trained by it"
    finding = only(changed(stale, 16, held={"ranks": "3", "k": "0"}, tracked={"model": "other"}))
    assert (finding.kind, finding.step, finding.certain) == (Kind.TRACKED, 16, True)
    assert finding.names == ("ranks", "model"), "k depends on no size"
    assert "ranks is 3 on rank 0, 2 in a process that was started with 2 ranks" in finding.text
    assert "behind step 14 the last rank had left" in finding.text


def test_other_samples_behind_the_change_are_found() -> None:
    finding = only(changed(RIGHT[2], 15, samples=["0"], held={"ranks": "3", "k": "0"}))
    assert (finding.kind, finding.step, finding.names) == (Kind.SAMPLES, 15, ("ranks",))


def test_batch_that_a_job_keeps_and_a_start_makes_anew_is_not_compared() -> None:
    """A loader of each rank's own batches: what a start with another size reads is a warning of its own."""
    fewer = {key: replace(r, samples=r.samples[:2]) if r.world == 2 else r for key, r in RIGHT[3].steps.items()}
    (warning,) = find([*RIGHT[:3], replace(RIGHT[3], steps=fewer)])
    assert (warning.kind, warning.scenarios) == (Kind.SIZE, (FEWER.title,))


def test_steps_before_the_change_are_compared_with_the_calm_run() -> None:
    run = RIGHT[2]
    other = {key: replace(r, tracked={"model": "x"}) if key[1] == 9 else r for key, r in run.steps.items()}
    finding = only(replace(run, steps=other))
    assert (finding.kind, finding.step, finding.names) == (Kind.TRACKED, 9, ("model",))


def test_runs_that_go_on_from_different_commits_are_not_compared_and_leave_no_stamp() -> None:
    later = {key: record for key, record in RIGHT[2].live.items() if key[1] > 15}
    runs = [*RIGHT[:2], changed(replace(RIGHT[2], live=later), 0, tracked={"model": "x"}), RIGHT[3]]
    assert find(runs) == []
    assert left_out(runs).startswith("the steps behind a change of size")
