"""What a rehearsal says of runs that differ, from records alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.rehearse import remedies
from everstep.rehearse.findings import Finding, Kind, find, left_out, unread
from everstep.rehearse.plan import (
    AUTO,
    EVALUATION,
    LEAST_STEPS,
    PERIODS,
    Kill,
    PlanError,
    Scenario,
    calm,
    check,
    scenarios,
)
from everstep.rehearse.play import Played, _copied, line_in
from everstep.rehearse.record import BUFFERS, DIGEST, NUMBER, OWN, UNCONVERTED, Record, began_again, note_unconverted
from everstep.rehearse.repeated_errors import RepeatedErrors
from everstep.rehearse.tracked_values import digests
from everstep.rehearse.watch import kept_by_loaders, samples
from everstep.rehearse.written import Written
from everstep.train.guards import common_samples, contents

RANKS, STEPS = 2, 16
_, *REST = scenarios(RANKS, STEPS, ("rank", "all", "size"))
AGAIN = scenarios(RANKS, STEPS, ())[0]
RANK, ALL, MORE, FEWER = REST


def record(rank: int, step: int, world: int = RANKS) -> Record:
    return Record(
        step, rank, world, 100 + rank, float(step), {"model": f"m{step}", "optimizer": f"o{step}"},
        {"lr": "0.1", "k.n": str(step)}, [f"{step}-{rank}"],
    )  # fmt: skip


def played(scenario: Scenario, killed: int = 1) -> Played:
    steps = {(rank, step): record(rank, step) for rank in range(RANKS) for step in range(1, STEPS + 1)}
    return Played(scenario, steps, 0, 1.0, killed, "")


def change(run: Played, first: int, **values: object) -> Played:
    """From this step on."""
    return replace(
        run, steps={key: replace(r, **values) if key[1] >= first else r for key, r in run.steps.items()}  # type: ignore[arg-type]
    )  # fmt: skip


CALM = played(calm(RANKS, STEPS), 0)


def only(runs: list[Played]) -> Finding:
    (finding,) = find(runs)
    return finding


def test_runs_that_are_alike_give_no_finding() -> None:
    assert find([CALM, played(AGAIN, 0), *map(played, REST)]) == []


def test_order_of_sets_is_named_where_the_hash_seed_alone_parts_two_calm_runs_and_the_kills_are_judged() -> None:
    other = change(played(AGAIN, 0), 3, tracked={"model": "x", "optimizer": "o"}, held={"lr": "0.1", "k.n": "9"})
    lost = change(played(ALL), 9, held={"lr": "0.1", "k.n": "1"})
    order, held = find([CALM, replace(other, alike=played(AGAIN, 0)), lost])
    assert (order.kind, order.step, "order of a set" in order.text) == (Kind.CHANCE, 3, True)
    assert (held.kind, held.names) == (Kind.HELD, ("k.n",))
    assert "order of a set" not in only([CALM, replace(other, alike=other), lost]).text
    assert "order of a set" not in only([CALM, replace(other, alike=replace(played(AGAIN, 0), code=1)), lost]).text


def test_first_difference_of_what_is_tracked_is_named_with_the_values_that_came_before_it() -> None:
    run = change(played(RANK), 9, held={"lr": "0.1", "k.n": "1"})
    run = change(run, 11, held={"lr": "0.1", "k.n": "1"}, tracked={"model": "x", "optimizer": "o"})
    finding = only([CALM, run])
    assert (finding.kind, finding.step, finding.certain) == (Kind.TRACKED, 11, True)
    assert set(finding.names) == {"k.n", "model", "optimizer"}
    assert "from step 11 on" in finding.text
    assert "k.n is 1 on rank" in finding.text


def test_value_without_another_result_is_a_warning_from_the_step_since_which_it_stays_other() -> None:
    run = change(change(played(ALL), 3, held={"lr": "0.2", "k.n": "0"}), 5, held={"lr": "0.1", "k.n": "0"})
    finding = only([CALM, run])
    assert (finding.kind, finding.step, finding.certain, finding.names) == (Kind.HELD, 3, False, ("k.n",))
    assert finding.text.endswith("declare it: run.untracked('k.n')")
    assert "run.untracked" not in only([replace(one, in_library=True) for one in (CALM, run)]).text


def test_parts_of_what_differs_itself_are_not_listed() -> None:
    plain = change(
        change(CALM, 0, held={"losses": "1 elements", "losses[0]": "2.0"}),
        9,
        held={"losses": "3 elements", "losses[0]": "1.0"},
    )
    run = change(played(ALL), 9, held={"losses": "1 elements", "losses[0]": "2.0"})
    assert only([plain, run]).names == ("losses",)


def test_object_that_differs_and_does_not_change_hides_no_part_of_it_that_does() -> None:
    run = change(CALM, 9, held={"lr": "0.1", "k": "K with 2 attributes", "k.n": "1"})
    held = {"lr": "0.1", "k": "K with 1 attributes"}
    calm_run = replace(
        CALM, steps={key: replace(r, held={**held, "k.n": str(key[1])}) for key, r in CALM.steps.items()}
    )
    finding = only([calm_run, replace(calm_run, scenario=AGAIN), replace(run, scenario=RANK, killed=1)])
    assert (finding.kind, finding.names) == (Kind.HELD, ("k.n",))


def test_what_changes_in_workers_is_a_warning_of_its_own_unless_it_is_declared() -> None:
    names = ("Rows.made", "Rows.seen", "Rows.seen[0]")
    runs = [replace(CALM, in_workers=names), played(AGAIN, 0)]
    finding = only(runs)
    assert (finding.kind, finding.certain, finding.names) == (Kind.WORKERS, False, ("Rows.made", "Rows.seen"))
    declared = change(runs[0], 1, untracked=["Rows.made", "Rows.seen"])
    assert find([declared, runs[1]]) == []
    assert find([runs[0]]) == [], "nothing that ends a rehearsal"


def drawing(rank: str, loss: str = "l", *, name: str = "random", each: int = 1) -> Played:
    """A calm run whose steps have no loader and draw in every `each`th of them. `rank`, `loss`: of rank 1; rank 0 has
    "r" and "l"."""
    steps = {
        (r, step): replace(
            one, samples=[], drawn={name: f"{('r', rank)[r]}{step}"} if step % each == 0 else {},
            losses=[f"{('l', loss)[r]}{step}"],
        )
        for (r, step), one in CALM.steps.items()
    }  # fmt: skip
    return replace(CALM, steps=steps)


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (drawing("r"), ("random",)),
        (drawing("r", name="torch", each=3), ("torch",)),
        (drawing("other"), ()),
        (drawing("r", "other"), ()),
        (drawing("r", each=STEPS + 1), ()),
    ],
    ids=["alike", "in some steps", "by rank", "each rank takes its part of them", "nothing is drawn"],
)
def test_ranks_that_draw_the_same_samples_are_a_warning_with_the_setting_that_parts_them(
    run: Played, names: tuple[str, ...]
) -> None:
    found = find([run, replace(run, scenario=AGAIN)])
    assert [(one.kind, one.certain, one.names) for one in found] == ([(Kind.DRAWS, False, names)] if names else [])
    assert all('everstep.start(rng="rank")' in one.text for one in found)


def test_one_rank_alone_shares_its_random_numbers_with_nobody() -> None:
    run = drawing("r")
    alone = {(r, step): replace(one, world=1) for (r, step), one in run.steps.items() if r == 0}
    run = replace(run, steps=alone)
    assert find([run, replace(run, scenario=AGAIN)]) == []


def test_tensor_that_may_be_a_ranks_own_is_advised_about_by_the_page_that_restructures_it() -> None:
    """As it is it could not be tracked, because ranks have others; a number can."""
    page = 'docs/how-to-restructure.md does under "Hidden state of each rank"'
    for value, is_named in (("tensor of shape [4, 32]", True), ("2 tensors", True), ("5", False)):
        plain = change(CALM, 0, held={"hidden": value + DIGEST + "0"})
        moved = change(plain, 5, held={"hidden": value + DIGEST + "1"})
        run = change(change(played(ALL), 0, held={"hidden": value + DIGEST + "2"}), 9, tracked={"model": "x"})
        assert (page in only([moved, run]).text) == is_named
    lost = replace(played(RANK), code=1, carried="hidden (train.py:9)", log="UnboundLocalError: 'hidden'")
    assert page in only([CALM, lost]).text


def test_script_that_never_calls_everstep_is_referred_to_the_page_that_converts_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for text, is_unconverted in (("import torch", True), ("from everstep import start", False)):
        script.write_text(text)
        note_unconverted(tmp_path, {str(script), "_ops.py"})
        assert (tmp_path / UNCONVERTED).exists() == is_unconverted
        (tmp_path / UNCONVERTED).unlink(missing_ok=True)
    nothing = replace(CALM, steps={})
    assert "ended before its first step" in only([nothing]).text
    text = only([replace(nothing, unconverted=True)]).text
    assert "never calls Everstep" in text
    assert "docs/how-to-convert.md" in text


def test_value_that_the_script_has_declared_untracked_is_no_warning_and_a_cause_all_the_same() -> None:
    run = change(played(ALL), 9, held={"lr": "0.1", "k.n": "1"}, untracked=["k"])
    assert find([CALM, run]) == []
    assert "k.n" in only([CALM, change(run, 9, tracked={"model": "x"})]).names


def test_what_a_library_counts_in_its_own_loader_is_no_value_of_the_scripts() -> None:
    class Counts(torch.utils.data.DataLoader[Any]):
        iteration = 0

    data = torch.utils.data.TensorDataset(torch.ones(2))
    from accelerate.data_loader import DataLoaderShard  # noqa: PLC0415 - seconds

    own, loader = Counts(data), DataLoaderShard(data)
    own.iteration, loader.seen = 1, 1  # type: ignore[attr-defined]
    names = kept_by_loaders({"own": own, "held": loader, "n": 3})
    assert "held.iteration" in names
    assert not {"held.seen", "own.iteration"} & set(names)


def test_same_finding_of_several_runs_is_one() -> None:
    runs = [change(played(s), 9, held={"lr": "0.1", "k.n": "1"}) for s in (RANK, ALL, MORE)]
    assert only([CALM, *runs]).scenarios == (RANK.title, ALL.title, MORE.title)


def test_value_that_never_changes_is_no_state_and_a_cause_all_the_same() -> None:
    values = {"lr": "0.1", "start": "0"}
    plain = change(CALM, 0, held=values)
    run = change(played(ALL), 9, held={"lr": "0.1", "start": "8"})
    assert find([plain, run]) == []
    assert "start" in only([plain, change(run, 9, tracked={"model": "x"})]).names


def test_another_size_has_only_the_values_that_all_ranks_share() -> None:
    def with_loss(run: Played, k: int) -> Played:
        held = {key: {"loss": f"{key}", "k": str(key[1] - k)} for key in run.steps}
        return replace(run, steps={key: replace(r, held=held[key]) for key, r in run.steps.items()})

    other = with_loss(played(MORE), 1)
    other = replace(other, steps={key: replace(r, held={**r.held, "loss": "9"}) for key, r in other.steps.items()})
    assert only([with_loss(CALM, 0), other]).names == ("k",)


@pytest.mark.parametrize(("there", "here", "found"), [("4.5", "4.4", False), ("4", "3", True), ("'a'", "'b'", True)])
def test_another_size_compares_no_fractions(there: str, here: str, found: bool) -> None:
    """A dropout draws others with another number of ranks, so a mean loss is another."""

    def with_value(run: Played, value: str) -> Played:
        held = {step: {"log.loss": value if step == STEPS else "0"} for _, step in run.steps}
        return replace(run, steps={key: replace(r, held=held[key[1]]) for key, r in run.steps.items()})

    assert bool(find([with_value(CALM, there), with_value(played(MORE), here)])) is found
    assert find([with_value(CALM, there), with_value(played(ALL), here)]), "with as many ranks it is the same"


def test_tensor_that_a_module_does_not_save_is_advised_to_be_a_buffer() -> None:
    def with_tensor(run: Played, name: str, digest: str) -> Played:
        held = {step: {name: f"tensor of shape [1]{DIGEST}{digest if step > 8 else ''}{step}"} for _, step in run.steps}
        return replace(run, steps={key: replace(r, held=held[key[1]]) for key, r in run.steps.items()})

    for name, is_advised in (("model.module.seen", True), ("hidden", False)):
        text = only([with_tensor(CALM, name, "a"), with_tensor(played(ALL), name, "b")]).text
        assert ("self.register_buffer(name, tensor), without persistent=False" in text) is is_advised
        assert "Hidden state of each rank" in text


def test_restart_from_nothing_is_a_warning() -> None:
    assert find([CALM, replace(played(RANK), saved=False)]) == [], "the other rank has the state"
    own = only([CALM, replace(played(RANK), saved=False, own_loop=True)])
    assert own.kind is Kind.UNSAVED
    assert f"nothing had been saved when {RANK.kills[-1].who} was killed" in own.text
    finding = only([CALM, replace(played(ALL), saved=False)])
    assert (finding.kind, finding.certain) == (Kind.UNSAVED, False)


def test_run_that_lost_something_else_than_it_should_is_not_judged() -> None:
    late = replace(played(ALL), late=True, saved=False)
    finding = only([CALM, late])
    assert (finding.kind, finding.certain) == (Kind.SLOW, False)
    assert only([CALM, change(late, 9, tracked={"model": "x"})]).kind is Kind.TRACKED, "what differs is proved"
    assert "nobody was killed at 1@9:tail" in only([CALM, replace(played(RANK), not_made=("1@9:tail",))]).text


def test_kill_of_some_ranks_is_not_called_one_of_all() -> None:
    kills = Kill.parse("0+1@12:begin"), Kill.parse("2@3:tail"), Kill.parse("2+0+1@13:tail")
    (some,) = (s for s in scenarios(3, STEPS, (), kills) if s.kills)
    assert some.title == (
        "ranks 0 and 1 killed in step 12 (begin), rank 2 killed in step 3 (tail), "
        "ranks 0, 1 and 2 killed in step 13 (tail)"
    )
    alone = replace(some, kills=kills[:2])
    assert "when ranks 0 and 1 were killed" in only([CALM, replace(played(alone), saved=False)]).text


def test_rank_that_is_written_twice_is_killed_once() -> None:
    kill = Kill.parse("1+1@12:begin")
    assert (kill.ranks, str(kill)) == ((1,), "rank 1 killed in step 12 (begin)")


def test_first_step_repeated_after_a_kill_within_it_is_no_new_beginning(tmp_path: Path) -> None:
    """The survivor has the state of step 0, and nothing could have been saved before."""
    (tmp_path / "killed-0+1@0:begin-0").touch()
    with (tmp_path / "records-1.jsonl").open("w") as file:
        file.write(replace(record(2, 1), at=time.time() + 1).line())
    assert not began_again(tmp_path)
    (tmp_path / "killed-0+1@12:begin-0").touch()
    assert began_again(tmp_path)


def test_loop_of_the_scripts_own_begins_again_if_it_did_behind_its_last_kill(tmp_path: Path) -> None:
    def killed(name: str, at: float) -> None:
        (tmp_path / f"killed-{name}").touch()
        os.utime(tmp_path / f"killed-{name}", (at, at))

    killed("1@2:begin-1", 10)
    with (tmp_path / "records-1.jsonl").open("w") as file:
        file.write(replace(record(0, 1), at=11).line())
    assert not began_again(tmp_path), "the other rank has the state"
    (tmp_path / OWN).touch()
    assert began_again(tmp_path)
    killed("0@9:begin-0", 12)
    assert not began_again(tmp_path), "that start went on from a commit"


def test_what_differs_between_two_calm_runs_is_compared_in_no_other() -> None:
    timed = [change(played(s), 0, held={"lr": "0.1", "took": str(i)}) for i, s in enumerate((AGAIN, RANK, ALL))]
    plain = change(CALM, 0, held={"lr": "0.1", "took": "9"})
    assert find([plain, *timed]) == []


def test_calm_runs_that_train_otherwise_are_a_finding_of_their_own() -> None:
    finding = only([CALM, change(played(AGAIN, 0), 4, tracked={"model": "x", "optimizer": "o4"})])
    assert (finding.kind, finding.step, finding.scenarios) == (Kind.CHANCE, 4, ("calm, once more",))


@pytest.mark.parametrize(
    ("of", "each", "apart"),
    [
        ({}, 'everstep.start(…, rng="rank")', True),
        ({"own_loop": True}, "torch.manual_seed(seed + dist.get_rank())", True),
        ({"in_library": True}, 'rng="rank"', False),  # where each rank has its own numbers anyway
        ({"by_commits": True}, 'rng="rank"', False),
    ],
)
def test_advice_to_seed_says_what_keeps_the_ranks_dropout_apart(of: dict[str, Any], each: str, apart: bool) -> None:
    calm_run = replace(CALM, **of)
    chance = only([calm_run, change(replace(played(AGAIN, 0), **of), 4, tracked={"model": "x", "optimizer": "o4"})])
    refused = only([replace(calm_run, code=1, refused=f"rank 1 reads other samples. {common_samples._REMEDY}")])
    for one in (chance, refused):
        assert "torch.manual_seed(0) before the model is made" in one.text
        assert (each in one.text) == apart


def metered(run: Played, *, seed: int, **others: str) -> Played:
    """With a tracked number of seconds, the same on all ranks. `others`: what it is instead, by rank and step."""
    steps = {}
    for (rank, step), one in run.steps.items():
        text = others.get(f"r{rank}s{step}", str(step + seed / 10))
        steps[rank, step] = replace(one, tracked={**one.tracked, METER: NUMBER + text})
    return replace(run, steps=steps)


METER = "meter['seconds']"


def test_tracked_number_that_differs_by_itself_is_no_finding() -> None:
    """It measures the time. What is trained is the same."""
    assert find([metered(CALM, seed=0), metered(played(AGAIN, 0), seed=1), metered(played(RANK), seed=2)]) == []


@pytest.mark.parametrize(
    ("others", "text", "step"),
    [
        ({f"r{rank}s{step}": str(step - 8) for rank in range(2) for step in range(9, 17)}, "falls from 8.2 to 1", 9),
        ({"r1s9": "8.7"}, "9.2 on rank 0 and 8.7 on rank 1", 9),
        ({"r0s9": "nan", "r1s9": "nan"}, "nan", 9),
    ],
    ids=["began anew", "ranks", "no number"],
)
def test_tracked_number_that_differs_by_itself_and_by_the_kill_is_found(
    others: dict[str, str], text: str, step: int
) -> None:
    calm_runs = [metered(CALM, seed=0), metered(played(AGAIN, 0), seed=1)]
    finding = only([*calm_runs, metered(played(RANK), seed=2, **others)])
    assert (finding.kind, finding.names, finding.step) == (Kind.TRACKED, (METER,), step)
    assert text in finding.text


def test_measured_attribute_that_the_state_of_its_object_forgets_is_a_warning() -> None:
    runs = []
    for i, one in enumerate((CALM, played(AGAIN, 0), played(ALL))):
        seconds = {key: str(key[1] + i / 10 - 8 * (i == 2 and key[1] > 8)) for key in one.steps}
        steps = {key: replace(r, held={"model.seconds": seconds[key]}) for key, r in one.steps.items()}
        runs.append(replace(one, steps=steps))
    finding = only(runs)
    assert (finding.kind, finding.names, finding.step) == (Kind.HELD, ("model.seconds",), 9)


def test_number_that_calm_runs_train_by_is_not_taken_for_a_measured_time() -> None:
    runs = [change(metered(CALM, seed=0), 3, tracked={"model": "x"}), metered(played(AGAIN, 0), seed=1)]
    assert only(runs).kind is Kind.CHANCE


def test_samples_are_those_of_all_ranks_together() -> None:
    swapped = {key: replace(r, samples=[f"{r.step}-{1 - r.rank}"]) for key, r in CALM.steps.items()}
    assert find([CALM, replace(played(FEWER), steps=swapped)]) == []
    finding = only([CALM, change(played(MORE), 7, samples=["other"])])
    assert (finding.kind, finding.step) == (Kind.SAMPLES, 7)
    padded = "pad to one length in the script, for its runs too, because a stamp counts for this program alone"
    assert padded in finding.text
    assert "(--kill=rank,all), which leaves a stamp too" in finding.text
    assert padded not in only([CALM, change(played(ALL), 7, samples=["other"])]).text
    assert "step 6 was computed from other samples" in finding.text


def test_other_samples_are_told_with_the_value_that_had_changed_by_then_and_what_to_do_about_it() -> None:
    run = change(change(played(ALL), 9, held={"lr": "0.1", "k.n": "1"}), 11, samples=["other"])
    finding = only([CALM, run])
    assert (finding.kind, finding.step, finding.names) == (Kind.SAMPLES, 11, ("k.n",))
    assert "from step 9 on, k.n is 1 on rank" in finding.text
    assert "run.track" in finding.text
    assert "run.loader" not in finding.text


def test_content_that_differs_is_told_without_its_digest() -> None:
    of = [f"5 elements{DIGEST}{i:016x}" for i in range(2)]
    plain = change(change(CALM, 0, held={"seen": of[0]}), 9, held={"seen": of[1]})
    finding = only([plain, change(played(ALL), 9, held={"seen": of[0]})])
    assert (finding.names, DIGEST) == (("seen",), contents.DIGEST)
    assert finding.text.startswith("seen is not the same 5 elements on rank")


def test_step_that_not_all_ranks_have_noted_is_not_compared() -> None:
    steps = {key: r for key, r in CALM.steps.items() if key != (1, STEPS)}
    run = replace(played(RANK), steps=steps)
    assert find([CALM, run]) == []
    assert left_out([CALM, run]) == f"step {STEPS} of rank 1"


def test_what_one_run_alone_has_is_not_taken_for_equal() -> None:
    killed = {(kill.ranks[0], kill.step + 1) for kill in RANK.kills}
    run = replace(played(RANK), steps={key: r for key, r in CALM.steps.items() if key not in killed})
    assert left_out([CALM, run, played(MORE)]) == "", "who was killed has not noted that step"
    without = change(played(ALL), STEPS, tracked={"model": f"m{STEPS}"})
    assert left_out([CALM, without]) == "optimizer (tracked in one run alone)"
    assert left_out([CALM, change(played(ALL), 3, beyond=["files"])]) == "files"


def test_class_whose_objects_cannot_be_read_is_listed_by_the_first_that_is_not_declared() -> None:
    names = ["line (_queue.SimpleQueue)", "lines[0] (_queue.SimpleQueue)", "room (threading.Semaphore)"]
    runs = [CALM, change(played(ALL), 3, unread=names)]
    assert (unread(runs), left_out(runs)) == ("line (_queue.SimpleQueue), room (threading.Semaphore)", "")
    runs = [CALM, change(played(ALL), 3, unread=names, untracked=["line", "room"])]
    assert unread(runs) == "lines[0] (_queue.SimpleQueue)"
    runs = [CALM, change(played(ALL), 3, unread=names, untracked=["line", "room", "lines"])]
    assert unread(runs) == ""


def test_tracked_object_that_cannot_be_read_is_named_and_has_no_digest() -> None:
    class Broken:
        def state_dict(self) -> dict[str, int]:
            raise ValueError

    deep: list[object] = []
    for _ in range(2000):
        deep = [deep]
    state = {"count": {"n": 1, "of": ["a", 0.5]}, "best": 2, "broken": Broken(), "deep": deep}
    found, unread = digests(state)
    assert unread == ["broken (ValueError)", "deep (RecursionError)"]
    numbers = {name: text for name, text in found.items() if name != "count"}
    assert numbers == {"count['n']": NUMBER + "1", "count['of'][1]": NUMBER + "0.5", "best": NUMBER + "2"}
    other, _ = digests({"count": {"n": 7, "of": ["a", torch.tensor(0.25)]}})
    assert other["count['of'][1]"] == NUMBER + "0.25"
    assert digests({"count": {"n": 7, "of": ["a", 0.25]}})[0]["count"] == found["count"]
    assert digests({"count": {"n": 7, "of": ["b", 0.25]}})[0]["count"] != found["count"]


def test_rows_of_samples_are_compared() -> None:
    assert samples(torch.zeros(2, 8)) != samples(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("run", "kind", "says"),
    [
        (replace(played(RANK), code=3, log="a\nValueError: no\n"), Kind.ENDED, "exit code 3: ValueError: no"),
        (
            replace(played(RANK), hung=True),
            Kind.ENDED,
            "did not come to its end within --limit: its last completed step is 16",
        ),
        (
            replace(played(RANK), code=1, repeated="exit code 1: TypeError: no", carried="hidden (train.py:3)"),
            Kind.ENDED,
            "TypeError: no; the next start ended with it too. In a new process these begin anew, because nothing "
            "tracks them: hidden (train.py:3)",
        ),
        (
            replace(played(RANK), code=1, refused="track k", carried="k (train.py:3)"),
            Kind.REFUSED,
            "track k. In a new process these begin anew, because nothing tracks them: k (train.py:3)",
        ),
        (replace(played(RANK), refused="track k"), Kind.REFUSED, "track k. A later start went on from the last commit"),
        (played(RANK, 0), Kind.ENDED, "nobody was killed"),
        (replace(played(RANK), steps=dict(list(CALM.steps.items())[:13])), Kind.ENDED, "ended after step 13"),
    ],
)
def test_run_that_ends_otherwise_is_a_finding(run: Played, kind: Kind, says: str) -> None:
    finding = next(f for f in find([CALM, run]) if f.kind is kind)
    assert says in finding.text


def test_number_of_a_batch_in_a_loop_that_began_anew_is_no_warning_and_another_counter_is() -> None:
    def run_of(scenario: Scenario, begins: int) -> Played:
        """Loops over a loader in epochs of ten batches; one begins at this step, too."""
        run = replace(played(scenario), by_commits=True)
        steps = {}
        for (rank, step), one in run.steps.items():
            position = (step - max(begins if step >= begins else 0, 10 if step > 10 else 0)) or 1
            held = {"batch_idx": str(position - 1), "n": str(position)}
            steps[rank, step] = replace(one, held=held, position=position, indices=["batch_idx"])
        return replace(run, steps=steps)

    finding = only([run_of(CALM.scenario, 99), run_of(RANK, 13)])
    assert (finding.kind, finding.names) == (Kind.HELD, ("n",))


def test_machine_that_is_too_slow_is_no_finding_against_the_script() -> None:
    slow = replace(played(AGAIN, 0), code=1, hung=True)
    other = change(played(RANK), 9, tracked={"model": "x"})
    finding = only([CALM, slow, other])
    assert (finding.kind, finding.certain) == (Kind.SLOW, False), "what differs by chance is not known"
    stopped = replace(played(RANK), code=1, hung=True, slow=True)
    assert [one.kind for one in find([CALM, played(AGAIN, 0), stopped])] == [Kind.SLOW]
    assert only([replace(CALM, code=1, hung=True, slow=True)]).kind is Kind.SLOW
    assert only([replace(CALM, code=1, hung=True)]).kind is Kind.ENDED


def test_calm_run_that_fails_once_is_a_warning_and_twice_a_finding() -> None:
    failed = replace(played(AGAIN, 0), code=1, log="RuntimeError: no")
    assert only([CALM, replace(failed, first=failed)]).kind is Kind.ENDED
    finding = only([CALM, replace(played(AGAIN, 0), first=failed), played(RANK)])
    assert (finding.kind, finding.certain) == (Kind.ONCE, False)
    assert "ended with exit code 1: RuntimeError: no" in finding.text
    assert find([CALM, replace(played(AGAIN, 0), first=replace(failed, hung=True, slow=True)), played(RANK)]) == []


def test_running_statistics_alone_are_a_warning_and_parameters_behind_them_are_found() -> None:
    calm_run = change(CALM, 1, tracked={"model": "m", f"{BUFFERS}model": "s"})
    apart = change(change(played(RANK), 1, tracked={"model": "m", f"{BUFFERS}model": "s"}), 8,
                   tracked={"model": "m", f"{BUFFERS}model": "t"})  # fmt: skip
    finding = only([calm_run, apart])
    assert (finding.kind, finding.step, finding.names) == (Kind.BUFFERS, 8, ("the buffers of model",))
    assert not finding.certain
    later = change(apart, 12, tracked={"model": "n", f"{BUFFERS}model": "t"})
    assert (only([calm_run, later]).kind, only([calm_run, later]).step) == (Kind.TRACKED, 12)


def test_file_that_differs_beside_running_statistics_may_do_so_by_them() -> None:
    """With the usual advice a newcomer looked for state of a step that there was not."""
    file = {"best.pt": Written(1, "a")}
    of_calm = {"tracked": {"model": "m", f"{BUFFERS}model": "s"}}
    calm_run, again = (replace(change(run, 1, **of_calm), files=file) for run in (CALM, played(AGAIN, 0)))
    apart = change(replace(change(played(RANK), 1, **of_calm), files={"best.pt": Written(1, "b", loaded=True)}), 8,
                   tracked={"model": "m", f"{BUFFERS}model": "t"})  # fmt: skip
    statistics, file_of_it = find([calm_run, again, apart])
    assert (statistics.kind, file_of_it.kind) == (Kind.BUFFERS, Kind.WRITTEN)
    assert file_of_it.text.endswith(remedies.BY_STATISTICS)
    alone = change(replace(played(RANK), files={"best.pt": Written(1, "b", loaded=True)}), 1, **of_calm)
    assert only([calm_run, again, alone]).text.endswith(remedies.OTHERWISE)


def test_line_that_declares_values_has_all_of_them() -> None:
    """It named six, and the next rehearsal warned of the others."""
    names = {f"top{n}.sum": str(n) for n in range(remedies.MOST_NAMED + 3)}
    calm_run, apart = (
        replace(run, steps={key: replace(r, held={name: f"{v}{key[1]}{text}" for name, v in names.items()})
                            for key, r in run.steps.items()})
        for run, text in ((CALM, "a"), (played(RANK), "b"))
    )  # fmt: skip
    text = only([calm_run, apart]).text
    assert text.count(" is ") >= remedies.MOST_NAMED
    assert "and 3 more" in text
    assert all(repr(name) in text.partition("run.untracked(")[2] for name in names)


def test_error_without_a_text_ends_with_no_colon() -> None:
    run = replace(CALM, code=1, log="12:00:00.000 everstep-run: rank 1: exit code 1: StopIteration:\n")
    assert "StopIteration. It had taken all" in only([run]).text


def test_runs_that_end_with_an_error_of_other_ranks_are_one_finding() -> None:
    runs = (replace(played(s), code=1, log=f"rank {i}: ValueError: no\n") for i, s in enumerate((RANK, ALL)))
    assert only([CALM, *runs]).scenarios == (RANK.title, ALL.title)


def test_short_calm_run_asks_for_more_steps() -> None:
    short = replace(CALM, steps={key: r for key, r in CALM.steps.items() if key[1] <= 5})
    assert "ended after 5 steps. At least 12 are needed" in only([short]).text


def test_kills_of_the_plan_lie_inside_the_run_one_behind_the_other() -> None:
    for steps in range(12, 60):
        for scenario in scenarios(3, steps, ("rank", "all", "size")):
            places = [kill.step for kill in scenario.kills]
            assert places == sorted(set(places))
            assert all(0 < step < steps for step in places)
    assert [kill.point for kill in RANK.kills] == list(AUTO)


def test_script_that_evaluates_loses_its_last_rank_in_an_evaluation_and_at_the_end_of_another() -> None:
    for evaluated, step, end in (
        ((5, 10, 12), 12, None), ((3, 10, 12), 3, 12), ((12,), 12, None), ((2, 10), 2, None), (range(1, 13), 7, 3),
    ):  # fmt: skip
        for passes, point in ((5, "evaluate"), (2, "evaluate"), (1, "forward"), (0, "forward")):
            (_, rank) = scenarios(3, 12, ("rank",), evaluated=dict.fromkeys(evaluated, passes))
            found = {kill.point: kill for kill in rank.kills if kill.point in EVALUATION}
            ends = {"evaluated": Kill((2,), end, "evaluated")} if end is not None else {}
            assert found == {point: Kill((2,), step, point), **ends}
            assert sorted(kill.point for kill in rank.kills) == sorted((*AUTO, *found))
    check(3, 12, (), (Kill.parse("2@12:evaluate"), Kill.parse("2@12:evaluated")))
    with pytest.raises(PlanError, match="2@12:begin"):
        check(3, 12, (), (Kill.parse("2@12:begin"),))


TRACEBACK = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "/run/folder/train.py", line 31, in <module>
[rank1]:     main()
[rank1]:   File "/run/folder/parts/steps.py", line 7, in step
[rank1]:     return len(hidden)
[rank1]:            ^^^^^^^^^^^
[rank1]:   File "/usr/lib/python3/site-packages/torch/a.py", line 9, in f
[rank1]:     g()
[rank1]: TypeError: object of type 'NoneType' has no len()
08:00:00.1 everstep-run: exit code 1: rank 1: exit code 1: TypeError: object of type 'NoneType' has no len()
"""
REFUSAL = """
everstep: refused: RuntimeError: a loss of its own
  File "/run/folder/train.py", line 12, in work
"""


def test_error_and_refusal_are_found_with_the_line_of_the_script() -> None:
    assert line_in(REFUSAL, Path("/run/folder")) == "train.py:12"
    assert line_in(REFUSAL, Path("/run/another")) == ""
    at = line_in(TRACEBACK, Path("/run/folder"))
    assert at == "parts/steps.py:7 (return len(hidden))"
    ended = replace(played(RANK), code=1, log=TRACEBACK, at=at)
    assert "has no len(). It came from parts/steps.py:7 (return len(hidden))" in only([CALM, ended]).text
    repeated = replace(ended, repeated="exit code 1: TypeError: no")
    assert (
        "the next start ended with it too. It came from parts/steps.py:7 (return len(hidden))"
        in only([CALM, repeated]).text
    )
    refused = replace(ended, refused="parts/steps.py:7: gradients are lost")
    assert "It came from" not in only([CALM, refused]).text


def test_kill_is_read_as_it_is_written() -> None:
    kill = Kill.parse("0+1@12:optimizer")
    assert (kill.ranks, kill.step, kill.point, kill.name) == ((0, 1), 12, "optimizer", "0+1@12:optimizer")


def test_another_size_may_read_each_sample_another_number_of_times_and_a_larger_batch_is_a_warning() -> None:
    def reading(run: Played, samples: int, times: int = 1) -> Played:
        each = [f"{i}" for i in range(samples)] * times
        return replace(run, steps={key: replace(r, samples=each) for key, r in run.steps.items()})

    size = RANKS + 1
    steps = {(rank, step): record(rank, step, size) for rank in range(size) for step in range(1, STEPS + 1)}
    more = replace(played(MORE), steps=steps)
    assert find([reading(CALM, 6), reading(more, 6, 2)]) == []
    finding = only([reading(CALM, 6), reading(change(more, 9, held={"lr": "0.1"}), 9)])
    assert (finding.kind, finding.certain) == (Kind.SIZE, False)
    assert "a step reads 27 samples, and 12 in the calm run" in finding.text
    assert only([reading(CALM, 6), reading(played(RANK), 9)]).kind == Kind.SAMPLES


def test_script_that_keeps_nothing_by_everstep_is_judged_by_no_loss() -> None:
    finding = only([change(CALM, 0, tracked={}), played(RANK)])
    assert (finding.kind, finding.certain) == (Kind.ENDED, True)
    assert "keeps no state by Everstep" in finding.text


def test_error_behind_the_last_step_says_that_there_may_be_too_few() -> None:
    failed = replace(CALM, code=1, log="RuntimeError: val_loss is not available\n")
    assert "--steps of a whole epoch" in only([failed]).text
    alone = "PeerLost: broadcast (train.py:9) is behind the loop, and a rank that it needs is gone\n"
    assert "--steps of a whole epoch" not in only([replace(failed, log=alone)]).text
    broken_off = {key: r for key, r in failed.steps.items() if key[1] < STEPS}
    assert "--steps of a whole epoch" not in only([replace(failed, steps=broken_off)]).text


@pytest.mark.parametrize(
    ("kind", "advice"), [({}, "run.track"), ({"own_loop": True}, "`restore`"), ({"in_library": True}, "attribute")]
)
def test_advice_is_what_this_kind_of_script_can_write(kind: dict[str, bool], advice: str) -> None:
    run = change(played(ALL), 9, held={"lr": "0.1", "k.n": "1"}, tracked={"model": "x", "optimizer": "o"})
    assert advice in only([CALM, replace(run, **kind)]).text  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [12, 40, 100])
def test_one_rank_is_lost_early_and_late_and_is_rank_0_too(steps: int) -> None:
    (lost,) = (s for s in scenarios(RANKS, steps, ("rank",)) if s.kills)
    assert {kill.ranks for kill in lost.kills} == {(0,), (RANKS - 1,)}
    assert [kill.step for kill in lost.kills] == sorted({kill.step for kill in lost.kills})
    assert (lost.kills[0].step, lost.kills[-1].step) == (2, steps - 2)
    assert {kill.point for kill in lost.kills} == set(AUTO)


def test_kills_of_one_rank_are_in_several_phases_of_each_short_period() -> None:
    """A script's own rhythm of two steps or of five is met in more than one of its phases."""
    for steps in range(LEAST_STEPS, 80):
        (lost,) = (s for s in scenarios(RANKS, steps, ("rank",)) if s.kills)
        for period in PERIODS if steps >= 18 else ():
            assert len({kill.step % period for kill in lost.kills}) >= 2, (steps, period)


def test_links_of_the_folder_lead_into_the_copy_and_nothing_is_written_through_them(tmp_path: Path) -> None:
    folder, outside, copy = tmp_path / "folder", tmp_path / "outside", tmp_path / "copy"
    for place in (folder / "data", folder / ".cache", outside):
        place.mkdir(parents=True)
        (place / "file").write_text("the user's")
    for name, to in (("in", "data"), ("hidden", ".cache"), ("out", outside), ("one", outside / "file"), ("no", "none")):
        (folder / name).symlink_to(to)
    assert _copied(folder, copy, tmp_path / "own") == copy
    assert {name: (copy / name / "file").read_text() for name in ("in", "hidden", "out")} == dict.fromkeys(
        ("in", "hidden", "out"), "the user's"
    )
    for name in ("in/file", "out/file", "one"):
        (copy / name).write_text("the rehearsal's")
    assert [(place / "file").read_text() for place in (folder / "data", outside)] == ["the user's"] * 2
    assert (copy / "data" / "file").read_text() == "the rehearsal's"


ENDED = "06:50:0{second}.000 everstep-run: rank {rank} (local rank {rank}, pid 1{second}): {text}\n"


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ([(1, "exit code 1: OSError: no (at 17:02:11)")] * 2, "exit code 1: OSError: no (at 17:02:11)"),
        ([(1, "exit code 1: OSError: at 1.5"), (1, "exit code 1: OSError: at 2")], "exit code 1: OSError: at 2"),
        ([(1, "exit code 3"), (1, "exit code 3")], "exit code 3, behind the line: no data"),
        ([(1, "SIGSEGV"), (1, "SIGSEGV")], "SIGSEGV"),
        ([(1, "exit code 3"), (1, "exit code 4")], ""),
        ([(1, "exit code 3"), (0, "exit code 3")], ""),
        ([(1, "exit code 3"), (0, "SIGKILL"), (1, "exit code 3")], ""),
    ],
    ids=["same", "same but for a time", "exit", "crash", "another code", "another rank", "a kill in between"],
)
def test_error_of_two_starts_of_a_rank_is_known_at_the_second(
    tmp_path: Path, ends: list[tuple[int, str]], error: str
) -> None:
    log = tmp_path / "log"
    log.touch()
    errors = RepeatedErrors(log)
    for second, (rank, text) in enumerate(ends):
        assert errors.look() == ""
        with log.open("a") as file:
            file.write("no data\n" + ENDED.format(second=second, rank=rank, text=text))
    assert errors.look() == error


def test_optimizer_that_the_script_has_loaded_is_a_warning_but_where_a_commit_is_the_beginning() -> None:
    loaded = replace(CALM, loaded="opt, schedule")
    found = only([loaded, played(AGAIN, 0)])
    assert (found.kind, found.certain, found.names) == (Kind.LOADED, False, ("opt", "schedule"))
    assert find([replace(loaded, begins=7), played(AGAIN, 0)]) == []


def test_command_imports_no_torch() -> None:
    """It takes seconds, and the processes of the runs import it themselves."""
    code = "import sys, everstep.cli.rehearse; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
