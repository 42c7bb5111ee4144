"""What a step draws is a function of seed, step and rank; what the ranks agree on, keep and restore for that."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everstep
from everstep.checkpoint import Checkpointer, RngState
from everstep.recovery.errors import LoopError
from everstep.recovery.state.randomness import (
    AHEAD,
    GOLDEN,
    WORD,
    PythonTwister,
    Randomness,
    Rng,
    Source,
    derive,
    generators_to_put_back,
    mix,
    words,
)
from everstep.recovery.state.shape import MODEL, Shape

CPU = torch.device("cpu")
GLOBAL = ("numpy", "python", "torch")
Told = list[tuple[int, ...]]
word = st.integers(0, WORD)


def seed_all(value: int) -> None:
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def draw() -> tuple[float, float, float]:
    return float(torch.randn(5).sum()), float(np.random.standard_normal()), random.gauss(0, 1)


def alone(told: Sequence[int]) -> Told:
    return [tuple(told)]


def world(*seeds: int, rng: Rng = True, restored: dict[int, Any] | None = None) -> list[Randomness]:
    """One of each rank, whose script has seeded all generators so, after they have agreed."""
    members = []
    for rank, value in enumerate(seeds):
        members.append(Randomness(rng, CPU))
        seed_all(value)
        members[-1].start()
        if restored and rank in restored:
            members[-1].load_state_dict(restored[rank])
    agree(members)
    return members


def agree(members: list[Randomness]) -> None:
    """Each in a thread of its own, as each is in a process of its own."""
    told: Told = [() for _ in members]
    met = Barrier(len(members))

    def settle(rank: int) -> None:
        def gather(values: Sequence[int]) -> Told:
            told[rank] = tuple(values)
            met.wait(30)
            return told

        members[rank].agree(gather)

    with ThreadPoolExecutor(len(members)) as threads:
        list(threads.map(settle, range(len(members))))


def at(member: Randomness, step: int, rank: int) -> tuple[float, float, float]:
    member.begin(step, rank)
    return draw()


# --- the seeds of steps


def test_multiples_of_the_step_keep_further_apart_than_ranks_reach() -> None:
    k = np.arange(1, 2**21, dtype=np.uint64)
    multiple = k * np.uint64(GOLDEN) & np.uint64(WORD)
    distance = np.minimum(multiple, np.uint64(2**32) - multiple)
    assert (distance * k >= 2**32 // 5).all()


@given(word, word)
def test_mixer_is_one_to_one(a: int, b: int) -> None:
    assert (mix(a) == mix(b)) == (a == b)


@settings(max_examples=30)
@given(st.integers(0, 2**63 - 1), st.sampled_from(GLOBAL), st.integers(0, 2**31), st.integers(0, 10**4))
def test_near_steps_and_ranks_never_have_the_same_seed(seed: int, name: str, step: int, rank: int) -> None:
    key = words(seed, name)
    found = {derive(key, step + i, rank + j) & WORD for i in range(64) for j in range(64)}
    assert len(found) == 64 * 64


@settings(max_examples=30)
@given(st.integers(0, 2**63 - 2))
def test_seeds_one_apart_and_generators_of_one_run_share_no_stream(seed: int) -> None:
    found = [
        derive(words(value, name), step, rank)
        for value in (seed, seed + 1)
        for name in (*GLOBAL, "shared")
        for step in range(16)
        for rank in range(16)
    ]
    assert len(set(found)) == len(found)


@pytest.mark.long
def test_first_numbers_of_steps_and_ranks_look_independent() -> None:
    (member,) = world(0, rng="rank")
    drawn = np.array([[at(member, step, rank) for rank in range(16)] for step in range(256)])
    n = 16 * 256
    for values in (drawn[..., 0] / 5**0.5, drawn[..., 1], drawn[..., 2]):
        assert abs(values.mean()) < 4 / n**0.5
        assert abs(values.var() - 1) < 4 * (2 / n) ** 0.5
        for a, b in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
            assert abs((a * b).mean()) < 4 / n**0.5
    kinds = drawn.reshape(n, 3) / [5**0.5, 1, 1]
    assert abs((kinds.T @ kinds / n)[np.triu_indices(3, 1)]).max() < 4 / n**0.5


# --- what the ranks agree on


def test_step_draws_the_same_whatever_was_drawn_before_it() -> None:
    (member,) = world(3)
    first = at(member, 7, 0)
    seed_all(99)
    torch.randn(1)  # the other half of a pair of normal numbers is kept for the next call
    np.random.standard_normal()
    random.gauss(0, 1)
    assert at(member, 7, 0) == first
    assert at(member, 8, 0) != first


def test_numbers_of_a_step_do_not_depend_on_where_a_process_began() -> None:
    one, other = world(3, 4)
    drawn = [at(one, step, 1) for step in range(2 * AHEAD + 3)]
    assert len(set(drawn)) == len(drawn)
    for step in (AHEAD, 2 * AHEAD + 2, 5, AHEAD - 1, AHEAD + 1):
        assert at(other, step, 1) == drawn[step]
        assert at(other, step, 0) != drawn[step]


@given(st.integers(0, 2**64 - 1))
def test_states_that_are_copied_into_pythons_generator_are_those_of_its_seed(value: int) -> None:
    generator = random.Random(1)
    generator.gauss(0, 1)
    assert PythonTwister.fits(generator)
    twister = PythonTwister(generator)
    (twister.memory[:],) = PythonTwister.ahead([value])
    assert generator.getstate()[:2] == random.Random(value).getstate()[:2]


def test_pythons_generator_is_seeded_where_its_state_is_not_found() -> None:
    (member,) = world(3)
    copied = at(member, 5, 0)
    source = member._sources["python"]
    assert source.twister is not None
    member._sources["python"] = Source(source.seed, source.state)
    member._make_ready()
    assert at(member, 5, 0) == copied


@pytest.mark.parametrize("drawn", [1, 2, 623, 624, 625, 1248])
def test_numpys_pair_of_normal_numbers_is_forgotten_however_much_was_drawn(drawn: int) -> None:
    (member,) = world(3)
    first = at(member, 0, 0), at(member, 1, 0)
    member.begin(0, 0)
    np.random.standard_normal()
    np.random.bytes(4 * drawn)
    assert at(member, 1, 0) == first[1]
    np.random.standard_normal()
    np.random.seed(5)
    np.random.standard_normal()
    assert at(member, 0, 0) == first[0]


def test_generator_that_takes_the_place_of_numpys_in_the_loop_is_refused() -> None:
    (member,) = world(3)
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    member.begin(0, 0)
    try:
        np.random.set_bit_generator(np.random.MT19937(1))  # type: ignore[attr-defined]
        with pytest.raises(LoopError, match=r"np\.random\.set_bit_generator\(…\) in the loop"):
            member.begin(AHEAD, 0)
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_ranks_that_were_seeded_alike_draw_alike_and_others_by_rank() -> None:
    alike = world(5, 5, 5)
    assert len({at(m, 4, rank) for rank, m in enumerate(alike)}) == 1
    apart = world(5, 6, 7)
    for kind in zip(*(at(m, 4, rank) for rank, m in enumerate(apart)), strict=True):
        assert len(set(kind)) == 3
    # Whichever process is rank 1 draws what rank 1 draws.
    assert at(apart[2], 4, 1) == at(apart[0], 4, 1)
    assert at(alike[0], 4, 0) == at(apart[0], 4, 0), "the seed of a run is rank 0's"


def divided(*seeds: int, restored: Any = None) -> list[tuple[Randomness, torch.Generator]]:
    """Ranks of replicas of two places; each rank's script seeds the global generators and one that it tracks so."""
    found = []
    for value in seeds:
        member, generator = Randomness(True, CPU), torch.Generator().manual_seed(value)
        member.shape = Shape(MODEL, 2)
        member.track("masks", generator)
        seed_all(value)
        member.start()
        if restored is not None:
            member.load_state_dict(restored)
        found.append((member, generator))
    agree([member for member, _ in found])
    return found


def masks(ranks: list[tuple[Randomness, torch.Generator]], step: int) -> list[float]:
    drawn = []
    for rank, (member, generator) in enumerate(ranks):
        member.begin(step, rank)
        drawn.append(float(torch.rand((), generator=generator)))
    return drawn


def test_tracked_generator_that_differs_by_place_goes_on_to_and_the_global_ones_draw_by_replica() -> None:
    by_place = divided(7, 8, 7, 8)
    drawn = masks(by_place, 3)
    assert len(set(drawn)) == 4
    torchs = [at(member, 3, rank)[0] for rank, (member, _) in enumerate(by_place)]
    assert (torchs[0], torchs[2]) == (torchs[1], torchs[3])
    assert torchs[0] != torchs[2]
    saved = json.loads(json.dumps(by_place[0][0].state_dict()))
    assert masks(divided(1, 1, restored=saved), 3) == drawn[:2], "also where new scripts have seeded otherwise"


def test_tracked_generator_that_differs_by_replica_alone_draws_alike_in_each() -> None:
    drawn = masks(divided(7, 7, 8, 8), 3)
    assert (drawn[0], drawn[2]) == (drawn[1], drawn[3])
    assert drawn[0] != drawn[2]
    assert len(set(masks(divided(7, 7, 7, 7), 3))) == 1


def test_option_lets_ranks_that_were_seeded_alike_draw_by_rank() -> None:
    members = world(5, 5, rng="rank")
    assert at(members[0], 4, 0) != at(members[1], 4, 1)


def test_generators_are_judged_one_by_one() -> None:
    members = []
    for rank in range(2):
        members.append(Randomness(True, CPU))
        seed_all(1)
        torch.manual_seed(1 + rank)
        members[-1].start()
    agree(members)
    a, b = at(members[0], 2, 0), at(members[1], 2, 1)
    assert a[0] != b[0]
    assert a[1:] == b[1:]


def test_newcomer_takes_the_runs_seed_and_not_its_own() -> None:
    old = world(5, 6)
    new = world(5, 8, restored={0: old[0].state_dict(), 1: old[0].state_dict()})
    assert at(new[1], 9, 1) == at(old[1], 9, 1)
    assert at(new[0], 9, 0) == at(old[0], 9, 0)
    # One that has not been given it yet hears of it.
    late = world(5, 8, restored={0: old[0].state_dict()})
    assert at(late[1], 9, 1) == at(old[1], 9, 1)


@pytest.mark.parametrize("seeds", [(5, 5), (5, 6)])
def test_run_that_began_alone_learns_with_its_second_rank_whether_they_are_alike(seeds: tuple[int, int]) -> None:
    (one,) = world(5)
    both = world(*seeds, restored={0: one.state_dict(), 1: one.state_dict()})
    assert at(both[0], 3, 0) == at(one, 3, 0)
    assert (at(both[0], 3, 0) == at(both[1], 3, 1)) == (seeds[0] == seeds[1])
    # And alone again it draws what it did.
    (again,) = world(9, restored={0: both[1].state_dict()})
    assert at(again, 3, 0) == at(one, 3, 0)


# --- in a session


def run_steps(run: Any, until: int, then: Callable[[], None] = lambda: None) -> list[tuple[float, float, float]]:
    found = []
    for step in run.steps(until=until):
        with step:
            found.append(draw())
        then()
    return found


def test_restored_run_goes_on_with_the_numbers_of_the_first(tmp_path: Path) -> None:
    seed_all(1)
    with everstep.start(str(tmp_path / "a")) as run:
        whole = run_steps(run, 6)
    after = draw()
    seed_all(1)
    with everstep.start(str(tmp_path / "b")) as run:
        first = run_steps(run, 3, then=lambda: seed_all(4))
    seed_all(2)
    with everstep.start(str(tmp_path / "b")) as run:
        rest = run_steps(run, 6)
    assert first + rest == whole
    assert draw() == after
    assert len(set(whole)) == 6


def test_commit_of_an_older_version_is_restored_and_its_generators_left(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(str(tmp_path))
    assert checkpointer.restore({"model": model, "rng": RngState()}) is None
    checkpointer.save(3, {"model": model, "rng": RngState()}).wait()
    checkpointer.close()
    other = torch.nn.Linear(2, 2)
    seed_all(1)
    with everstep.start(str(tmp_path)) as run:
        run.track(model=other)
        found = run_steps(run, 5)
    assert torch.equal(other.weight, model.weight)
    seed_all(1)
    with everstep.start() as run:
        assert run_steps(run, 5)[3:] == found


@pytest.mark.long
def test_saved_generators_go_on_where_the_commit_left_them(tmp_path: Path) -> None:
    def play(until: int) -> list[float]:
        seed_all(1)
        own = torch.Generator().manual_seed(1)
        with everstep.start(str(tmp_path), rng="saved") as run:
            run.track(own=own)
            return [*sum(run_steps(run, until), ()), float(torch.rand((), generator=own))]

    seed_all(1)
    stream = [draw() for _ in range(4)]
    first = play(2)
    second = play(4)
    assert [*first[:-1], *second[:-1]] == [*sum(stream, ())]
    assert first[-1] == second[-1], "the generator of its own was saved before it drew"


def test_generators_are_left_alone_if_that_is_asked_for() -> None:
    seed_all(1)
    stream = [draw() for _ in range(3)]
    seed_all(1)
    with everstep.start(rng=False) as run:
        assert run_steps(run, 3) == stream


def test_tracked_generators_are_set_at_each_step() -> None:
    def play(before: int) -> list[float]:
        seed_all(1)
        a, b, c = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)
        d = np.random.RandomState(1)
        found = []
        with everstep.start() as run:
            run.track(a=a, b=b, c=c, d=d)
            for step in run.steps(until=3):
                if step.number < before:
                    a.seed(), b.random(5), c.random(), d.rand(3)
                with step:
                    found += [float(torch.rand((), generator=a)), float(b.random()), c.random(), float(d.rand())]
        return found

    plain = play(0)
    assert len(set(plain)) == 12
    assert play(2) != plain, "what is drawn before the step but in its turn is a part of it"
    assert play(2)[8:] == plain[8:]


def test_shared_generator_draws_the_same_on_all_ranks_and_in_any_mode() -> None:
    for rng in (True, "rank", "saved", False):
        members = world(5, 6, rng=rng)  # type: ignore[arg-type]
        drawn = []
        for rank, member in enumerate(members):
            for step in (2, 3, 2):
                member.begin(step, rank)
                drawn.append(float(torch.rand((), generator=member.shared)))
        assert drawn[:3] == drawn[3:]
        assert drawn[0] == drawn[2] != drawn[1]


def test_shared_generator_may_be_taken_before_the_steps_and_not_drawn_from() -> None:
    seed_all(1)
    with everstep.start() as run:
        shared = run.shared_rng
        found = []
        for step in run.steps(until=2):
            with step:
                found.append(float(torch.rand((), generator=shared)))
                assert run.shared_rng is shared
    assert found[0] != found[1]
    run = everstep.start()
    torch.rand((), generator=run.shared_rng)
    with pytest.raises(LoopError, match=r"run\.shared_rng was drawn from before the first step"):
        run_steps(run, 1)
    run.close()


@pytest.mark.parametrize(
    ("rng", "generator", "words"),
    [
        (True, random.SystemRandom(), "track a random.Random instead"),
        (False, np.random.default_rng(), "track\\(own=…\\): a Generator is set at each step, .* leave `rng=` out"),
        ("step", None, "start\\(rng='step'\\): True, 'rank', 'saved' or False is expected"),
    ],
)
def test_what_cannot_be_repeated_is_refused(rng: Any, generator: Any, words: str) -> None:
    with pytest.raises(LoopError, match=words):
        everstep.start(rng=rng).track(own=generator)


def test_name_of_a_tracked_generator_is_taken() -> None:
    run = everstep.start()
    run.track(own=torch.Generator())
    with pytest.raises(LoopError, match="'own' is tracked already"):
        run.track(own=torch.nn.Linear(1, 1))
    with pytest.raises(LoopError, match="'own' is tracked already"):
        run.track(own=random.Random())
    run.close()


def test_step_that_is_repeated_needs_its_generators_back_only_if_they_are_not_set_for_it() -> None:
    assert generators_to_put_back({"seeds": Randomness(True, CPU)}) == []
    assert len(generators_to_put_back({"seeds": Randomness(False, CPU)})) == 1
    assert len(generators_to_put_back({})) == 1


def test_numpys_global_generator_may_be_another_one() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
        member = Randomness(True, CPU)
        member.start()
        member.agree(alone)
        first = at(member, 1, 0)
        np.random.random(3)
        assert at(member, 1, 0) == first
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
