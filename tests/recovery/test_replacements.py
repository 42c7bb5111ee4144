"""Functions that are replaced for a run, beside another library that replaces the same ones."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep.torch_private.patches import Replacements, replace
from everstep.train.feeding.resharding import Resharding
from everstep.train.feeding.unmanaged_loaders import UnmanagedLoaders
from everstep.train.worlds import Messages


class Base:
    def add(self, n: int) -> list[str]:
        return [f"own {n}"]


class Kind(Base):
    pass


def noting(word: str) -> Callable[[Any], Any]:
    def make(function: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            return [word, *function(*arguments, **named)]

        return noted

    return make


def library() -> Any:
    found: Any = ModuleType("library")
    found.add = lambda n: [f"own {n}"]
    return found


def test_what_is_still_ours_is_taken_back_to_the_very_function() -> None:
    holder = library()
    before = holder.add
    replaced = Replacements()
    replaced.put("add", noting("ours"), holder)
    assert holder.add(n=1) == ["ours", "own 1"]
    replaced.end()
    replaced.end()
    assert holder.add is before


def test_what_another_library_has_put_around_ours_stays_and_ours_does_nothing_in_it() -> None:
    holder = library()
    replaced = Replacements()
    replaced.put("add", noting("ours"), holder)
    around = holder.add = noting("theirs")(holder.add)
    replaced.end()
    assert holder.add is around
    assert holder.add(2) == ["theirs", "own 2"]


def test_a_function_that_another_library_has_set_in_place_of_ours_stays() -> None:
    holder = library()
    replaced = Replacements()
    replaced.put("add", noting("ours"), holder)
    theirs = holder.add = lambda n: [f"theirs {n}"]
    replaced.end()
    assert holder.add is theirs


def test_what_was_replaced_before_us_is_called_by_ours_and_there_again_behind_it() -> None:
    holder = library()
    theirs = holder.add = noting("theirs")(holder.add)
    replaced = Replacements()
    replaced.put("add", noting("ours"), holder)
    assert holder.add(3) == ["ours", "theirs", "own 3"]
    replaced.end()
    assert holder.add is theirs


@pytest.mark.parametrize("first", [0, 1])
def test_two_runs_may_end_in_either_order(first: int) -> None:
    holder = library()
    runs = [Replacements(), Replacements()]
    for i, run in enumerate(runs):
        run.put("add", noting(f"run {i}"), holder)
    runs[first].end()
    assert holder.add(4) == [f"run {1 - first}", "own 4"]
    runs[1 - first].end()
    assert holder.add(4) == ["own 4"]


@pytest.mark.parametrize("put_on", ["class", "object"])
def test_what_a_class_or_an_object_inherits_is_inherited_again(put_on: str) -> None:
    one = Kind()
    holder: Any = Kind if put_on == "class" else one
    replaced = Replacements()
    replaced.put("add", noting("ours"), holder)
    assert one.add(5) == ["ours", "own 5"]
    replaced.end()
    assert "add" not in vars(holder)
    assert one.add(5) == ["own 5"]


def test_holders_of_one_function_get_one_and_holders_of_two_each_keep_theirs() -> None:
    a, b, c = library(), library(), library()
    b.add = a.add
    c.add = lambda n: [f"traced {n}"]
    replace("add", noting("ours"), a, b, c)
    assert a.add is b.add
    assert a.add(6) == ["ours", "own 6"]
    assert c.add(6) == ["ours", "traced 6"]


# --- what the session replaces


def messages() -> Callable[[], None]:
    return Messages(lambda: 0).end


def samplers() -> Callable[[], None]:
    return Resharding(2).end


def loaders() -> Callable[[], None]:
    watch = UnmanagedLoaders(worlds_change=False)
    watch.begin(None, {})
    return watch.end


@pytest.mark.parametrize(
    ("holder", "name", "begin"),
    [(distributed_c10d, "send", messages), (dist, "recv", messages), (DistributedSampler, "__init__", samplers),
     (DistributedSampler, "__iter__", samplers), (_BaseDataLoaderIter, "__next__", loaders)],
)  # fmt: skip
def test_end_of_a_run_keeps_what_a_profiler_has_put_around_torchs_functions(
    holder: Any, name: str, begin: Callable[[], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, name, getattr(holder, name))  # taken back when the test ends
    end = begin()
    profiled = noting("profiled")(getattr(holder, name))
    setattr(holder, name, profiled)
    end()
    assert getattr(holder, name) is profiled


def test_send_that_a_tracer_replaced_before_the_run_is_traced_in_the_run_and_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[Any] = []
    monkeypatch.setattr(dist, "send", lambda *arguments: traced.append(arguments))
    tracer = dist.send
    replaced = Messages(lambda: 0)
    dist.send(1)  # type: ignore[arg-type]
    replaced.end()
    assert traced == [(1,)]
    assert dist.send is tracer


def test_loader_that_is_iterated_after_the_run_through_a_profiler_works() -> None:
    replaced = UnmanagedLoaders(worlds_change=False)
    before = _BaseDataLoaderIter.__next__
    replaced.begin(None, {})
    ours: Any = _BaseDataLoaderIter.__next__
    seen: list[int] = []

    def profiled(iterator: Any) -> Any:
        seen.append(1)
        return ours(iterator)

    try:
        _BaseDataLoaderIter.__next__ = profiled  # type: ignore[method-assign]
        replaced.end()
        assert len(list(DataLoader(list(range(4)), batch_size=2))) == 2  # type: ignore[arg-type]
        assert len(seen) == 3
        assert not replaced._now, "an ended watch notes nothing"
    finally:
        _BaseDataLoaderIter.__next__ = before  # type: ignore[method-assign]
