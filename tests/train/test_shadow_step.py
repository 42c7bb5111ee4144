"""A new process plays another rank's part: what is compared, where the part may be left, what a refusal names.

Whole runs with a process killed are rows of `tests/ordinary`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.train.guards import plain_values as plain_values_module
from everstep.train.guards.comparison.local_gradients import LocalGradients
from everstep.train.guards.comparison.shadow_step import ShadowStep
from everstep.train.guards.leavable_block import may_be_left
from everstep.train.guards.plain_values import differences, plain_values, untracked_values

Block = Callable[[torch.nn.Module, LocalGradients], None]
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU(), torch.nn.Linear(7, 1))


def told(block: Block) -> tuple[torch.Tensor, LocalGradients]:
    net = model()
    gradients = LocalGradients({"model": net})
    gradients.begin()
    block(net, gradients)
    gradients.end()
    return gradients.totals(), gradients


def difference(a: Block, b: Block) -> str | None:
    mine, gradients = told(a)
    return gradients.first_difference(mine, told(b)[0])


def plain(net: torch.nn.Module, _: LocalGradients) -> None:
    net(X).pow(2).mean().backward()


def test_same_block_has_the_same_gradients() -> None:
    assert difference(plain, plain) is None


def test_gradients_that_differ_by_rounding_are_the_same() -> None:
    def halves(net: torch.nn.Module, _: LocalGradients) -> None:
        (net(X).pow(2).sum() * 1.000001 / 12).backward()

    assert difference(plain, halves) is None


@settings(deadline=None)
@given(st.floats(0.5, 2.0).filter(lambda scale: abs(scale - 1) > 1e-3))
def test_another_scale_of_the_loss_shows(scale: float) -> None:
    def scaled(net: torch.nn.Module, _: LocalGradients) -> None:
        (net(X).pow(2).mean() * scale).backward()

    assert difference(plain, scaled) is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda net, _: net(X.flip(1)).pow(2).mean().backward(),
        lambda net, _: net(X).abs().mean().backward(),
        lambda net, _: net(X[:8]).pow(2).mean().backward(),
        lambda net, _: net[:1](X).pow(2).mean().backward(),
        lambda net, _: (net(X) * float("nan")).mean().backward(),
        lambda net, _: None,
    ],
    ids=["samples", "loss", "fewer", "part of the model", "nan", "nothing"],
)
def test_another_computation_shows(other: Block) -> None:
    assert difference(plain, other) is not None
    assert difference(other, plain) is not None


def test_values_that_are_not_finite_are_the_same_as_themselves() -> None:
    def nan(net: torch.nn.Module, _: LocalGradients) -> None:
        (net(X) * float("nan")).mean().backward()

    assert difference(nan, nan) is None


def test_two_micro_batches_are_added_up() -> None:
    def two(net: torch.nn.Module, _: LocalGradients) -> None:
        for part in X.chunk(2):
            net(part).pow(2).mean().backward()

    mine, gradients = told(two)
    assert mine[:, 0].tolist() == [2.0] * len(gradients.names)
    assert difference(two, two) is None


def test_what_comes_behind_another_ranks_values_is_not_counted() -> None:
    def gathered(scale: float) -> Block:
        def block(net: torch.nn.Module, gradients: LocalGradients) -> None:
            assert not gradients.collective("allgather")
            (net(X).pow(2).mean() * scale).backward()

        return block

    assert difference(gathered(1.0), gathered(0.5)) is None
    assert not told(gathered(1.0))[0].any()


def test_backward_pass_behind_averaged_gradients_is_not_counted() -> None:
    """SAM's second pass begins from parameters that were moved by the average over the ranks."""

    def sam(moved: float) -> Block:
        def block(net: torch.nn.Module, gradients: LocalGradients) -> None:
            last = next(iter(net.parameters()))
            hook = last.register_hook(lambda _: gradients.collective("allreduce") and None)
            net(X).pow(2).mean().backward()
            hook.remove()
            with torch.no_grad():
                last.add_(moved)
            net(X).pow(2).mean().backward()

        return block

    mine, _ = told(sam(0.5))
    assert mine[:, 0].max() == 1
    assert difference(sam(0.5), sam(0.25)) is None


def test_gradients_of_an_embedding_may_be_sparse() -> None:
    def block(index: int) -> torch.Tensor:
        torch.manual_seed(0)
        table = torch.nn.Embedding(5, 3, sparse=True)
        gradients = LocalGradients({"table": table})
        gradients.begin()
        table(torch.tensor([index, 2])).sum().mul(index + 1).backward()
        gradients.end()
        return gradients.totals()

    torch.manual_seed(0)
    gradients = LocalGradients({"table": torch.nn.Embedding(5, 3, sparse=True)})
    assert gradients.first_difference(block(0), block(0)) is None
    assert gradients.first_difference(block(0), block(1)) == "table.weight"


def test_parameter_of_an_optimizer_alone_is_named_by_its_place() -> None:
    scale = torch.nn.Parameter(torch.ones(2))
    gradients = LocalGradients({"optimizer": torch.optim.SGD([scale], lr=0.1)})
    assert gradients.names == ["parameter 0 of optimizer"]


# --- who plays, and when


class Others:
    """Members of a world, of whom this process is `rank`; `ages` and `lefts`, steps without a shadow step, is what all
    have told."""

    def __init__(self, rank: int, ages: list[int], lefts: Sequence[int] = ()) -> None:
        self.rank, self.world_size, self.ages = rank, len(ages), ages
        self.lefts = lefts or [0] * len(ages)

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        if len(values) == 3:
            return [(age, 0, left) for age, left in zip(self.ages, self.lefts, strict=True)]
        return [tuple(values)] * self.world_size


@given(
    members=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(0), st.integers(0, 40))), min_size=1, max_size=4),
    steps=st.integers(1, 40),
)
@settings(deadline=None)
def test_all_members_know_who_plays_and_as_whom(members: list[tuple[int, int]], steps: int) -> None:
    ages, lefts = [age for age, _ in members], [left for _, left in members]
    said = list[list[tuple[int | None, bool, bool]]]()
    for rank, age in enumerate(ages):
        others: Any = Others(rank, ages, lefts)
        shadow_step = ShadowStep({}, others, lambda *_: None)
        shadow_step._age, shadow_step._left = age, lefts[rank]
        shadow_step.agree(joins=False, step=0)
        told = list[tuple[int | None, bool, bool]]()
        for _ in range(steps):
            told.append((shadow_step._model, shadow_step._due, shadow_step._computes))
            with mock.patch.object(ShadowStep, "_compare"):
                shadow_step.compare()
        said.append(told)
    for step in range(steps):
        models = {told[step][0] for told in said}
        playing = [rank for rank, told in enumerate(said) if told[step][1]]
        assert len(models) == 1
        assert {told[step][2] for told in said} == {bool(playing)}
        model = models.pop()
        if model is not None:
            assert ages[model] == max(ages)
            assert model not in playing
        compared = []
        for rank, age in enumerate(ages):
            now, left = age + step, lefts[rank]
            due = now == left or (now.bit_count() == 1 and now > left + 1)
            if age < max(ages) and (due or now == 0 or now.bit_count() == 1 < now):
                compared.append(rank)
            assert (rank in playing) == (age < max(ages) and due)
        assert (model is None) == (not compared), "the plain values of a rehearsed member are compared too"


@pytest.mark.parametrize(
    ("rehearsed", "step", "first"),
    [(0, 0, 0), (0, 70, 0), (40, 33, 7), (40, 39, 1), (40, 40, 1), (40, 5000, 1)],
)
def test_new_process_is_compared_soon_behind_the_rehearsed_steps(rehearsed: int, step: int, first: int) -> None:
    others: Any = Others(1, [200, 0])
    shadow_step = ShadowStep({}, others, lambda *_: None, rehearsed=rehearsed)
    others.lefts = [0, shadow_step._leaves_out(step)]
    shadow_step.agree(joins=True, step=step)
    with mock.patch.object(ShadowStep, "_compare"):
        while not shadow_step._due:
            shadow_step.compare()
    assert shadow_step._age == first


def test_process_whose_script_fills_a_cache_is_compared_in_its_first_step() -> None:
    mask = functools.cache(abs)  # of the script: a later step would find what this process has put into it
    others: Any = Others(1, [200, 0])
    shadow_step = ShadowStep({}, others, lambda *_: None, rehearsed=40)
    others.lefts = [0, 0]
    shadow_step.agree(joins=True, step=70)
    assert shadow_step._due, mask


def test_process_that_was_given_a_later_state_plays_like_a_new_one() -> None:
    others: Any = Others(1, [7, 0])
    shadow_step = ShadowStep({}, others, lambda *_: None)
    shadow_step._age = 5
    shadow_step.agree(joins=True, step=0)
    assert shadow_step._age == 0
    assert shadow_step.first
    assert shadow_step._due


class FromRank0(Others):
    """Members whose rank 0 has told its buffers."""

    told = b""

    def from_rank(self, source: int, data: bytes) -> bytes:
        assert source == 0
        FromRank0.told = data or FromRank0.told
        return FromRank0.told


@pytest.mark.long
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None)
def test_part_has_the_buffers_of_rank_0(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    def made(value: int) -> dict[str, torch.Tensor]:
        return {str(i): torch.full(shape, value).to(kind) for i, (kind, shape) in enumerate(kinds)}

    theirs, mine = made(1), made(0)
    first, second = (FromRank0(rank, [7, 0]) for rank in (0, 1))
    for others, buffers in ((first, theirs), (second, mine)):
        told: Any = others
        shadow_step = ShadowStep({}, told, lambda *_: None, lambda buffers=buffers: buffers)
        shadow_step._age = told.ages[told.rank]
        shadow_step.agree(joins=False, step=0)
    assert shadow_step.is_due(lambda: True)
    assert shadow_step.begin() == 0
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor)


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [(torch.zeros(3), torch.zeros(2)), (torch.zeros(2**25), torch.zeros(2**25))],
    ids=["size", "MiB"],
)
def test_process_whose_buffers_cannot_be_rank_0s_does_not_play(theirs: torch.Tensor, mine: torch.Tensor) -> None:
    for rank, buffer in enumerate((theirs, mine)):
        told: Any = FromRank0(rank, [7, 0])
        shadow_step = ShadowStep({}, told, lambda *_: None, lambda buffer=buffer: {"queue": buffer})
        shadow_step._age = told.ages[rank]
        FromRank0.told = b"" if rank == 0 else FromRank0.told
        shadow_step.agree(joins=False, step=0)
    assert not shadow_step.is_due(lambda: True)


@pytest.mark.long_but("values alone")
@pytest.mark.parametrize("due", [True, False], ids=["gradients too", "values alone"])
def test_value_that_steps_have_changed_and_a_new_process_lacks_is_named_once(
    due: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = FromRank0(0, [7, 0]), FromRank0(1, [7, 0])
    told: Any = first
    counted, declared, of_rank, carried = 0, 0, 0, {"tracked": 0}
    trained = ShadowStep({"carried": carried}, told, lambda *_: None)
    told = second
    new = ShadowStep({"carried": carried}, told, lambda *_: None, may_differ=lambda name: name == "declared")
    trained.begin()
    trained._age = 7
    for shadow_step in (trained, new):
        shadow_step.agree(joins=False, step=0)
    counted, declared, carried["tracked"] = 7, 7, 7
    trained.begin()
    counted, declared, carried["tracked"], of_rank = 0, 0, 0, 1
    if not due:
        new.cannot("of its own reasons")
    new.begin()
    for _ in range(2):
        trained._compare(0)
        new._compare(0)
    assert (counted, declared, of_rank) == (0, 0, 1)
    named = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "that the script" in r.message]
    assert [text.partition(". Track")[0].partition(": ")[2] for text in named] == [
        "counted (7 there, 0 in the new process)"
    ]
    skipped = [r for r in caplog.records if r.levelno == logging.WARNING and "of its own reasons" in r.getMessage()]
    assert bool(skipped) == (not due)


def test_tensors_are_compared_by_digest_where_steps_have_changed_them(caplog: pytest.LogCaptureFixture) -> None:
    """Those that are tracked, and those that all processes have alike, are not named."""
    net = torch.nn.Linear(1, 1)
    average, constant, array = [torch.zeros(3)], torch.randn(3), np.zeros(2, "timedelta64[s]")
    hidden = {"h": torch.zeros(2), "c": [torch.zeros(2)]}
    state = {"net": net, "memory": (memory := torch.zeros(2))}
    told: Any = FromRank0(0, [7, 0])
    trained = ShadowStep(state, told, lambda *_: None)
    told = FromRank0(1, [7, 0])
    new = ShadowStep(state, told, lambda *_: None)
    trained.begin()
    trained._age = 7
    for shadow_step in (trained, new):
        shadow_step.agree(joins=False, step=0)
    average[0] += 1
    hidden["c"][0] += 1
    array += 1
    memory += 1
    net.weight.data += 1
    trained.begin()
    average[0] -= 1
    hidden["c"][0] -= 1
    array -= 1
    constant.add_(1)
    new.begin()
    trained._compare(0)
    new._compare(0)
    (text,) = [r.getMessage() for r in caplog.records if "that the script" in r.message]
    of_tensor = r"tensor of shape \[\d\] with digest \w{16}"
    assert re.findall(rf"(\S+) \({of_tensor} there, {of_tensor} in the new process\)", text) == [
        "average[0]", "hidden['c'][0]",
    ]  # fmt: skip
    assert "array (array of shape [2] with digest" in text
    assert "constant" not in text


def test_carried_tensors_come_first_and_what_is_beyond_the_bound_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plain_values_module, "MOST_BYTES", 48)
    held = {"data": torch.zeros(8), "bank": torch.zeros(100), "queue": torch.zeros(8), "mask": torch.zeros(4)}
    carried = {f"held['{name}']": ("held", f"['{name}']") for name in ("bank", "queue")}
    for _ in range(2):
        found = untracked_values(sys._getframe(), {}, carried)
    assert [name for name in held if "with digest" in found.get(f"held['{name}']", "")] == ["queue", "mask"]
    (text,) = [r.getMessage() for r in caplog.records]
    assert text.endswith(": held['bank']")


# --- where the part may be left

LEFT = {
    "nothing follows": """
        for step in steps():
            with step:
                work()
        """,
    "asks whether the step counts": """
        for step in steps():
            with step:
                work()
            if step.completed and number % 2:
                print(number)
        """,
    "something before": """
        for step in steps():
            print("begins")
            with step:
                work()
        """,
    "counted": """
        for number, step in enumerate(steps()):
            with step:
                work()
        """,
    "in a function": """
        def main():
            for step in steps():
                with step:
                    work()

        main()
        """,
    "through a generator": """
        def shown():
            for step in steps():
                yield step

        for step in shown():
            with step:
                work()
        """,
}
TO_ITS_END = {
    "something follows": """
        for step in steps():
            with step:
                work()
            print("done")
        """,
    "what else it does if the step does not count": """
        for step in steps():
            with step:
                work()
            if step.completed:
                print("done")
            else:
                print(loss)
        """,
    "asked behind what is read": """
        for step in steps():
            with step:
                work()
            if loss > 1 and step.completed:
                print("done")
        """,
    "block in a function": """
        def learn(step):
            with step:
                return work()

        for step in steps():
            learn(step)
        """,
    "by hand": """
        step = next(steps())
        with step:
            work()
        """,
    "through a generator that does more": """
        def shown():
            for step in steps():
                yield step
                print(loss)

        for step in shown():
            with step:
                work()
        """,
}


def left(tmp_path: Path, script: str) -> bool:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    found: list[bool] = []

    def steps() -> Iterator[Any]:
        found.append(may_be_left(sys._getframe(1)))
        yield contextlib.nullcontext()

    with contextlib.suppress(NameError, AttributeError):
        runpy.run_path(str(path), {"steps": steps, "work": lambda: None, "number": 0})
    (answer,) = found
    return answer


@pytest.mark.parametrize("name", LEFT)
def test_block_that_nothing_follows_may_be_left(name: str, tmp_path: Path) -> None:
    assert left(tmp_path, LEFT[name])


@pytest.mark.parametrize("name", TO_ITS_END)
def test_block_that_something_follows_runs_to_its_end(name: str, tmp_path: Path) -> None:
    assert not left(tmp_path, TO_ITS_END[name])


# --- what is raised


class Restless(dict[str, Any]):
    """As a configuration whose values are computed when they are read."""

    def items(self) -> Any:
        raise ValueError("missing mandatory value")


class Unspeakable(int):
    def __repr__(self) -> str:
        raise ValueError("not for print")


def test_methods_of_the_scripts_own_classes_are_not_called_when_values_are_read() -> None:
    options, count, size = Restless(a=1), Unspeakable(3), 7
    assert options is not None
    assert count == 3
    found = plain_values(sys._getframe())
    assert (found["size"], found["count"], found["options['a']"]) == (str(size), "3", "1")


def test_conjugated_complex_gradients_are_summed_up() -> None:
    weight = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    gradients = LocalGradients({"optimizer": torch.optim.SGD([weight], lr=0.1)})
    gradients.begin()
    (weight.conj() * torch.tensor([1j, 2.0])).sum().abs().backward()
    gradients.end()
    assert gradients.totals()[0, 0] == 1


# --- what a refusal names


class Options:
    loss = staticmethod(torch.nn.functional.mse_loss)
    strength = 0.5


class Seen:
    def __init__(self, seen: Any) -> None:
        self.kinds = set(seen)


def held(alpha: float, seen: Any) -> dict[str, str]:
    options = Options
    config = {"alpha": alpha, "seen": Seen(seen)}
    assert options is Options
    assert config
    return plain_values(sys._getframe())


def test_values_that_differ_are_named_the_nearest_first() -> None:
    there, here = held(0.5, [1, 2]), held(1.0, [])
    found = differences(there, here)
    assert found[:2] == [
        "seen (2 elements there, 0 elements in the new process)",
        "alpha (0.5 there, 1.0 in the new process)",
    ]
    assert "config['alpha'] (0.5 there, 1.0 in the new process)" in found
    of_set = r"config\['seen'\]\.kinds \(2 elements with digest \w{16} there, 0 elements with digest \w{16} in the new"
    assert [one for one in found if re.match(of_set, one)]
    assert not [name for name in found if name.startswith("options")]


class Registry:
    only: Registry | None = None

    def __init__(self) -> None:
        self.taken = 3


def test_attributes_of_classes_are_compared_wherever_the_class_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another file, behind an object alone, and what one object of the class has that the class keeps."""
    text = "class Skip(Exception):\n    n = 4\n\ndef made():\n    class Hidden:\n        n = 5\n    return Hidden()\n"
    (tmp_path / "shadow_options.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Registry, "only", Registry())
    options: Any = importlib.import_module("shadow_options")
    hidden, registry = options.made(), Registry
    found = plain_values(sys._getframe())
    assert hidden
    assert registry is Registry
    assert {found["options.Skip.n"], found["Hidden.n"], found["registry.only.taken"]} == {"4", "5", "3"}


def test_class_attributes_and_functions_are_told() -> None:
    found = held(0.5, [])
    assert found["options.strength"] == "0.5"
    assert found["options.loss"] == "mse_loss"
