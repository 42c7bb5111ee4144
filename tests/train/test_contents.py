"""Values of all kinds are read by what they contain, and the same is the same in each process."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import gc
import inspect
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.train.guards import contents
from everstep.train.guards import plain_values as plain_values_module
from everstep.train.guards.contents import Beyond, Contents, digest_of
from everstep.train.guards.plain_values import Roots, differences, plain_values, untracked_values

pytestmark = [pytest.mark.timeout(360), pytest.mark.usefixtures("no_other_tests")]


class Registry(dict[str, float]):
    pass


@dataclasses.dataclass
class Plateau:
    best: float = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    best: float = 1.0


class Own:
    def __init__(self) -> None:
        self.inner = argparse.Namespace(best=1.0)

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __hash__(self) -> int:
        raise AssertionError

    def __repr__(self) -> str:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    @property
    def twice(self) -> float:
        raise AssertionError


class Counting(list[float]):
    """Its own methods change it, as those of a queue that counts its readers."""

    def __len__(self) -> int:
        raise AssertionError

    def __iter__(self) -> Iterator[float]:
        raise AssertionError


def plateau() -> Iterator[float]:
    waited = 0.0
    while True:
        waited += 1
        yield waited


async def waits() -> None:
    await asyncio_sleep()


@types.coroutine
def asyncio_sleep() -> Iterator[None]:
    yield
    yield


def clip(norm: float, seen: list[float] = []) -> None:  # noqa: B006
    seen.append(norm)


def keeps(norm: float, *, seen: dict[str, float] = {}) -> None:  # noqa: B006
    seen["last"] = norm


def rate() -> float:
    rate.__dict__["taken"] = rate.__dict__.get("taken", 0) + 1
    return 0.1


class Rates:
    def low(self) -> float:
        return 0.1

    def high(self) -> float:
        return 0.2


class Low:
    pass


class High:
    pass


def nested(depth: int) -> list[Any]:
    found: list[Any] = [0]
    for _ in range(depth):
        found = [found]
    return found


def innermost(x: list[Any]) -> list[Any]:
    while isinstance(x[0], list):
        x = x[0]
    return x


def chained(depth: int) -> Any:
    found: Any = Plateau()
    for _ in range(depth):
        found = types.SimpleNamespace(inner=found)
    return found


def last(x: Any) -> Any:
    while hasattr(x, "inner"):
        x = x.inner
    return x


def made() -> Callable[[], None]:
    taken = collections.Counter[str]()

    def count() -> None:
        taken["taken"] += 1

    return count


def registered() -> dict[str, list[Callable[[], None]]]:
    return {"loss": [made()]}


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Counter": (collections.Counter, lambda x: x.update("a")),
    "defaultdict": (lambda: collections.defaultdict(float), lambda x: x.update(a=1.0)),
    "OrderedDict": (lambda: collections.OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
    "dict subclass": (lambda: Registry(a=1.0), lambda x: x.update(a=2.0)),
    "attribute of a dict subclass": (lambda: Registry(a=1.0), lambda x: setattr(x, "best", 2.0)),
    "dict with tuple keys": (lambda: {(1, 2): 1.0}, lambda x: x.update({(1, 2): 2.0})),
    "ChainMap": (lambda: collections.ChainMap({"a": 1.0}), lambda x: x.update(a=2.0)),
    "UserDict": (lambda: collections.UserDict({"a": 1.0}), lambda x: x.update(a=2.0)),
    "SimpleNamespace": (lambda: types.SimpleNamespace(best=1.0), lambda x: setattr(x, "best", 2.0)),
    "argparse.Namespace": (lambda: argparse.Namespace(best=1.0), lambda x: setattr(x, "best", 2.0)),
    "dataclass": (Plateau, lambda x: setattr(x, "best", 2.0)),
    "dataclass with slots": (Slots, lambda x: setattr(x, "best", 2.0)),
    "object in an object": (Own, lambda x: setattr(x.inner, "best", 2.0)),
    "array": (lambda: array.array("d", [1.0]), lambda x: x.__setitem__(0, 2.0)),
    "bytearray": (lambda: bytearray(b"a"), lambda x: x.__setitem__(0, 2)),
    "deque": (lambda: collections.deque([1.0, 2.0]), lambda x: x.rotate()),
    "set": (lambda: {1, 2}, lambda x: (x.remove(1), x.add(3))),
    "list": (lambda: [0.0] * 100, lambda x: x.__setitem__(90, 1.0)),
    "list subclass": (lambda: Counting([0.0] * 100), lambda x: x.__setitem__(90, 1.0)),
    "list of objects": (lambda: [0] * 20 + [Plateau()], lambda x: setattr(x[20], "best", 2.0)),
    "list of tuples": (lambda: [(i, 0.0) for i in range(40)], lambda x: x.__setitem__(30, (30, 1.0))),
    "text": (lambda: ["x" * 100 + "a"], lambda x: x.__setitem__(0, "x" * 100 + "b")),
    "random.Random": (lambda: random.Random(1), lambda x: x.random()),
    "numpy Generator": (lambda: np.random.default_rng(1), lambda x: x.random()),
    "numpy RandomState": (lambda: np.random.RandomState(1), lambda x: x.rand()),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), lambda x: torch.rand(1, generator=x)),
    "generator": (plateau, next),
    "coroutine": (waits, lambda x: x.send(None)),
    "count": (itertools.count, next),
    "iterator of a list": (lambda: iter([1, 2, 3]), next),
    "iterator of a dictionary": (lambda: iter({"a": 1, "b": 2}), next),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "chain of iterators": (lambda: zip(itertools.count(), iter([1, 2]), strict=False), next),
    "closure": (made, lambda x: x()),
    "closure in a registry": (registered, lambda x: x["loss"][0]()),
    "attribute of a function": (lambda: rate, lambda x: x()),
    "default": (lambda: clip, lambda x: x(1.0)),
    "default of a keyword": (lambda: keeps, lambda x: x(1.0)),
    "array of numpy": (lambda: np.zeros(3), lambda x: x.__setitem__(0, 1.0)),
    "array of objects": (lambda: [np.array([1, "a"], object)], lambda x: x[0].__setitem__(0, 2)),
    "scalar of numpy": (lambda: [np.float32(1.0)], lambda x: x.__setitem__(0, np.float32(2.0))),
    "read-only mapping": (
        lambda: types.MappingProxyType(dict.fromkeys(range(20), 0)),
        lambda x: gc.get_referents(x)[0].update({3: 1}),
    ),
    "view of values": (lambda: dict.fromkeys("abc", 1).values(), lambda x: gc.get_referents(x)[0].update(a=2)),
    "long number": (lambda: [10**5000], lambda x: x.__setitem__(0, 10**5000 + 1)),
    "fraction of long numbers": (lambda: [Fraction(1, 10**5000)], lambda x: x.__setitem__(0, Fraction(3, 10**5000))),
    "list nested 10 deep": (lambda: nested(10), lambda x: innermost(x).__setitem__(0, 1)),
    "object nested 10 deep": (lambda: chained(10), lambda x: setattr(last(x), "best", 2.0)),
    "method": (lambda: [Rates().low], lambda x: x.__setitem__(0, Rates().high)),
    "method of a built-in class": (lambda: [{"a": 1}.get], lambda x: x[0].__self__.update(a=2)),
    "draw of a generator": (lambda: random.Random(1).random, lambda x: x()),
    "step of an iterator": (lambda: iter([1, 2, 3]).__next__, lambda x: x()),
    "lambda": (lambda: [lambda x: x, lambda x: 2 * x], lambda x: x.reverse()),
    "lambda among many": (lambda: [lambda x: x, lambda x: 2 * x] * 9, lambda x: x.reverse()),
    "nothing and an object": (lambda: [None], lambda x: x.__setitem__(0, Plateau())),
    "object of another class": (lambda: [Low()], lambda x: x.__setitem__(0, High())),
    "class": (lambda: [Low], lambda x: x.__setitem__(0, High)),
    "attribute that is there": (Plateau, lambda x: setattr(x, "taken", None)),
    "tensor in a queue": (lambda: collections.deque([torch.zeros(2)]), lambda x: x[0].add_(1)),
    "tensor in a generator": (lambda: adds(torch.zeros(2)), next),
}


def adds(total: torch.Tensor) -> Iterator[torch.Tensor]:
    while True:
        total += 1
        yield total


def read(x: Any) -> dict[str, str]:
    found = untracked_values(sys._getframe(), {})
    return {name: text for name, text in found.items() if re.match(r"(x|taken|total)\b", name)}


@pytest.mark.long_but(
    "dataclass", "closure", "generator", "defaultdict", "object in an object", "array of numpy", "torch.Generator"
)
@pytest.mark.parametrize("kind", CHANGES)
def test_content_that_changes_shows_under_the_name_of_its_holder(kind: str) -> None:
    make, change = CHANGES[kind]
    x = make()
    before, again = read(x), read(x)
    change(x)
    after = read(x)
    assert before == again, "to read a value does not change it"
    assert differences(before, after), "under a name that both have"


def test_attribute_of_a_tracked_module_is_read_and_what_its_state_dict_has_is_not() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.beta, self.seen = torch.nn.Linear(2, 2), 0.5, {"n": 1}
            self.bank = torch.zeros(2)

    model = torch.nn.Sequential(Net())
    state = {"model": model, "count": (count := {"n": 1})}
    assert count
    found = untracked_values(sys._getframe(), state)
    assert {name: text for name, text in found.items() if name.startswith("model.") and "digest" not in text} == {
        "model.0.beta": "0.5", "model.0.seen": "1 elements", "model.0.seen['n']": "1",
    }  # fmt: skip
    assert "with digest" in found["model.0.bank"]
    assert not [name for name in found if name.startswith("count")]


def test_what_is_too_much_is_named_and_not_taken_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    many, deep = [0] * (contents.ELEMENTS + 1), [0]
    for _ in range(contents.DEPTH * 2):
        deep = [deep] * 20  # type: ignore[list-item]
    beyond = list[str]()
    found = plain_values(Roots(sys._getframe(), {}), beyond)
    assert f"many (more than {contents.ELEMENTS} elements)" in beyond
    assert [one for one in beyond if one.startswith("deep (")]
    assert found["many"] == f"{len(many)} elements"
    monkeypatch.setattr(contents, "PARTS", 10)
    with pytest.raises(Beyond, match="more than 10 parts"):
        Contents().digest([Plateau()] * 10)


def test_value_that_is_too_deep_or_too_long_is_named_and_the_others_are_read() -> None:
    deep, long, many, size = nested(400), 1 << 10_000_000, np.array([None] * (contents.ELEMENTS + 1)), 7
    beyond = list[str]()
    own = {"deep": deep, "long": long, "many": many, "keys": {1 << 20_000: 1}, "size": size}
    found = plain_values(Roots(None, {}, own.items()), beyond)
    assert found["size"] == str(size)
    assert [one.partition(" (")[0] for one in beyond if not one.startswith("deep")] == [
        "long", "many", "keys",
    ]  # fmt: skip
    assert [one for one in beyond if one.startswith("deep")]


def test_values_that_cannot_be_read_at_all_are_not_taken_for_equal() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise ValueError(name)

    class Broken(metaclass=Meta):
        pass

    assert isinstance(Broken, type)
    beyond = list[str]()
    assert plain_values(sys._getframe(), beyond) == {}
    assert [one for one in beyond if one.startswith("the script's values (ValueError: ")]


def test_equal_values_do_not_differ_where_those_before_them_have_used_up_the_bound() -> None:
    x = [("a", i) for i in range(20)]

    def read_behind(others: int) -> tuple[dict[str, str], list[str]]:
        before = {i: [(i, j) for j in range(contents.PARTS - 100)] for i in range(others)}
        beyond = list[str]()
        found = plain_values(Roots(None, {}, [*((f"other{i}", one) for i, one in before.items()), ("x", x)]), beyond)
        return found, beyond

    (alone, nothing), (beside, beyond) = read_behind(0), read_behind(contents.TOGETHER + 1)
    assert "with digest" in alone["x"]
    assert (nothing, "x" in beside) == ([], False)
    assert [one for one in beyond if one.startswith("x (")]


@pytest.mark.long
def test_equal_tensors_do_not_differ_where_those_before_them_have_used_up_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_behind(size: int) -> dict[str, str]:
        before, x = torch.zeros(size), torch.ones(4)
        assert before is not x
        return {name: text for name, text in untracked_values(sys._getframe(), {}).items() if name == "x"}

    monkeypatch.setattr(plain_values_module, "MOST_BYTES", 64)
    assert "with digest" in read_behind(1)["x"]
    assert read_behind(15) == {}


def test_container_is_not_copied_whole_to_be_read() -> None:
    many, text = collections.Counter(range(200_000)), "x" * 10_000_000
    assert many
    assert text
    tracemalloc.start()
    found = plain_values(sys._getframe())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["many"] == "200000 elements"
    assert most < 4_000_000, "a copy has more"


def test_parts_that_stand_in_many_places_are_read_once() -> None:
    def doubled(leaf: int) -> list[Any]:
        found: list[Any] = [leaf]
        for _ in range(60):
            found = [found, found]
        return found

    assert digest_of(doubled(1)) == digest_of(doubled(1)) != digest_of(doubled(2))
    part: list[Any] = [1]
    ring: list[Any] = [part, part]
    ring.append(ring)
    alike: list[Any] = [[1], [1]]
    alike.append(alike)
    assert digest_of(ring) == digest_of(alike)


def test_value_that_contains_itself_has_a_digest() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    other: list[Any] = [1]
    other.append(other)
    assert Contents().digest(ring) == Contents().digest(other) != Contents().digest([1, [1]])


# --- the same in each process

FLOATS = st.floats().map(lambda number: float(repr(number)))  # a NaN comes to another process without its bits
LEAVES = st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.booleans() | st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.text(max_size=3))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=5))
        | st.tuples(st.just("set"), st.lists(KEYS, max_size=6))
        | st.tuples(st.just("dict"), st.lists(st.tuples(KEYS, inner), max_size=6))
        | st.tuples(st.just("object"), st.lists(st.tuples(st.sampled_from("abcdef"), inner), max_size=4))
    ),
    max_leaves=12,
)  # fmt: skip


def built(tree: Any) -> Any:
    """The value that a tree of plain parts describes."""
    if not isinstance(tree, tuple):
        return tree
    kind, parts = tree
    if kind == "object":
        return types.SimpleNamespace(**{key: built(one) for key, one in parts})
    if kind == "dict":
        return {key: built(one) for key, one in parts}
    return {"list": list, "tuple": tuple, "set": set}[kind](built(one) if kind != "set" else one for one in parts)


CHILD = f"""
import sys
import tracemalloc
import types
from typing import Any
from everstep.train.guards.contents import Contents
{inspect.getsource(built)}
for line in sys.stdin:
    print(Contents().digest(built(eval(line, {{"nan": float("nan"), "inf": float("inf")}}))), flush=True)
"""


@pytest.fixture(scope="module")
def other_process() -> Iterator[subprocess.Popen[str]]:
    """With another seed of hashes than this one, which has a random one."""
    started = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    yield started
    started.communicate()


def told(process: subprocess.Popen[str], tree: Any) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(repr(tree) + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@settings(deadline=None, max_examples=100)
@given(tree=TREES, other=TREES)
@pytest.mark.long
def test_digest_is_the_same_in_each_process_and_another_for_another_value(
    other_process: subprocess.Popen[str], tree: Any, other: Any
) -> None:
    mine = Contents().digest(built(tree))
    assert told(other_process, tree) == mine
    if Contents().digest(built(other)) == mine:
        assert json.dumps(shape(built(tree))) == json.dumps(shape(built(other)))


def shape(value: Any) -> Any:
    """What distinguishes two values, as JSON."""
    kind = type(value).__name__
    if isinstance(value, types.SimpleNamespace):
        return [kind, sorted([key, shape(one)] for key, one in vars(value).items())]
    if isinstance(value, dict):
        return [kind, sorted(json.dumps([shape(key), shape(one)]) for key, one in value.items())]
    if isinstance(value, set):
        return [kind, sorted(json.dumps(shape(one)) for one in value)]
    if isinstance(value, list | tuple):
        return [kind, [shape(one) for one in value]]
    return [kind, value.hex() if isinstance(value, bytes | float) else value]
