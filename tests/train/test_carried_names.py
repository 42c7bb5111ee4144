"""The names that a loop carries are those that a step reads and an earlier step has bound."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from everstep.train.guards.carried_names import Reader, TooLarge

STEPS = 6


def carried(body: str, before: str = "", values: dict[str, Any] | None = None) -> list[str]:
    """What the reader finds in `for step in steps:` with this body. `before`: runs first."""
    names: dict[str, Any] = dict(values or {})
    exec(before, names)
    loop = ast.parse("for step in steps:\n" + textwrap.indent(textwrap.dedent(body), "    ")).body[0]
    assert isinstance(loop, ast.For)
    reader = Reader(names, "train.py")
    reader.loop(loop)
    return sorted(one.name for one in reader.carried())


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("n += 1", ["n"]),
        ("n = n + 1", ["n"]),
        ("n = 0\nn += 1", []),
        ("loss = f(step)\nprint(loss)", []),
        ("if step:\n    loss = 1\nprint(loss)", ["loss"]),
        ("if step:\n    loss = 1\nelse:\n    loss = 2\nprint(loss)", []),
        ("print(last)\nlast = f(step)", ["last"]),
        ("for part in step:\n    total += part", ["total"]),
        ("total = 0\nfor part in step:\n    total += part", []),
        ("for part in step:\n    last = part\nprint(last)", ["last"]),
        ("with step as batch:\n    x, (y, *z) = batch\n    print(x, y, z)", []),
        ("if step:\n    continue\nn = 1", []),
        ("if step:\n    state.best = 1", ["state.best"]),
        ("state.last = step", []),
        ("for p in step:\n    p.grad /= 2", []),
        ("state.n += 1", ["state.n"]),
        ("state = State()\nstate.n += 1", []),
        ("values['n'] += 1", ["values['n']"]),
        ("values[step] = 1\nprint(values)", ["values"]),
        ("try:\n    x = f()\nexcept ValueError:\n    pass\nprint(x)", ["x"]),
        ("try:\n    x = f()\nexcept ValueError:\n    x = None\nprint(x)", []),
        ("print([last for last in step])", []),
        ("print((lambda last: last)(step), [n for m in step])\nn = 1", ["n"]),
        ("def closure():\n    return last\nf(closure)\nlast = step", ["last"]),
        ("last = step\ndef closure():\n    return last\nf(closure)", []),
        ("match step:\n    case 1:\n        x = 1\n    case _:\n        x = 2\nprint(x)", ["x"]),
        ("while (n := f(step)):\n    print(n)", []),
        ("try:\n    continue\nfinally:\n    n += 1", ["n"]),
        ("while True:\n    x = f()\n    if x:\n        break\nprint(x)", []),
        ("while True:\n    if f():\n        break\n    x = 1\nprint(x)", ["x"]),
        ("while True:\n    for d in range(2):\n        break\n    x = 1\n    if f():\n        break\nprint(x)", []),
        ("while f():\n    x = 1\n    break\nprint(x)", ["x"]),
        ("if a:\n    x = 1\nelif b:\n    x = 2\nelse:\n    x = 3\nprint(x)", []),
        ("if a:\n    x = 1\nelif b:\n    x = 2\nprint(x)", ["x"]),
    ],
)
def test_name_is_carried_if_a_step_may_read_what_an_earlier_one_has_bound(body: str, names: list[str]) -> None:
    assert carried(body) == names


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("if run.micro == 0:\n    parts = []\nparts.append(step)\nprint(parts)", []),
        ("if run.micro == 1:\n    parts = []\nparts.append(step)\nprint(parts)", ["parts"]),
        ("if other.micro == 0:\n    parts = []\nparts.append(step)\nprint(parts)", ["parts"]),
        ("if run.micro == 0:\n    parts = []\nelse:\n    last = 1\nprint(parts, last)", ["last"]),
    ],
)
def test_what_the_first_batch_of_each_step_binds_is_not_carried(body: str, names: list[str]) -> None:
    run = type("Prepared", (), {"__module__": "everstep.train.adapters.prepared"})()  # that imports accelerate
    assert carried(body, "other = object()", {"run": run, "parts": []}) == names


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        ("for i, step in enumerate(steps):\n    with step as batch:\n        print(i)", ["i"]),
        ("for step in enumerate(steps):\n    with step as batch:\n        print(i)", []),
        ("for step, other in zip(steps, others):\n    with step as batch:\n        print(other)", ["other"]),
        ("for i, (x, y) in enumerate(loader):\n    print(i, x, y)", ["i"]),
        ("for x, y in loader:\n    print(x, y)", []),
    ],
)
def test_index_beside_a_step_is_carried_by_what_counts_it(loop: str, names: list[str]) -> None:
    parsed = ast.parse(loop).body[0]
    assert isinstance(parsed, ast.For)
    reader = Reader({}, "train.py")
    reader.loop(parsed)
    assert [one.name for one in reader.carried()] == names


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("losses.append(step)", []),
        ("losses.append(step)\nprint(losses[-1])", ["losses"]),
        ("losses.count(1)\nprint(losses)", []),
        ("x = losses.pop()", ["losses"]),
        ("x = next(numbers)", ["numbers"]),
        ("mean.mul_(0.9)\nf(mean)", ["mean"]),
        ("losses += [1]", ["losses"]),
        ("losses.clear()\nlosses.append(step)\nprint(losses[-1])", []),
        ("losses.append(step)\nprint(losses[-1])\nlosses.clear()", ["losses"]),
        ("if step:\n    losses.clear()\nlosses.append(step)\nprint(losses[-1])", ["losses"]),
    ],
)
def test_container_is_carried_if_its_methods_change_it_and_a_step_reads_it(body: str, names: list[str]) -> None:
    before = "import itertools, torch\nlosses = []\nnumbers = itertools.count()\nmean = torch.zeros(1)"
    assert carried(body, before) == names


SCRIPT = """
import functools
import torch
from carried_options import Shared

count = 0
seen = []

def tick():
    global count
    count += 1
    return count

def work(of, factor=1):
    local = factor
    local += 1
    of.total += local

class Meter:
    def __init__(self):
        self.n, self.total = 0, 0

    @property
    def mean(self):
        self.n += 1
        return self.total / self.n

    def update(self, value):
        last = value
        self._add(last)

    def _add(self, value):
        self.total += value

    def __call__(self):
        self.n += 1

class Counted:
    n = 0

    @classmethod
    def count(cls):
        cls.n += 1

class Net(torch.nn.Module):
    def forward(self, x):
        self.calls = self.calls + 1
        return x

meter = Meter()
def of_function():
    of_function.n += 1

net, parts = Net(), torch.nn.Sequential(torch.nn.ReLU(), Net())
net.calls = 0
callbacks = [meter.update, Meter()]
bound = functools.partial(work, meter)
"""


# The file of options of another name has a function with the name of a method.
OPTIONS = """
class Shared:
    n = 0

    @classmethod
    def count(cls):
        cls.n += 1

def count():
    global n
    n += 1
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables of a script that has a file, and imports another one."""
    (tmp_path / "carried_options.py").write_text(OPTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "carried_options", raising=False)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SCRIPT, str(path), "exec"), names)
    return names


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("x = tick()", ["count"]),
        ("f(tick)", ["count"]),
        ("work(meter)", ["meter.total"]),
        ("work(of=meter)", ["meter.total"]),
        ("m = Meter()\nwork(m)", []),
        ("meter.update(step)", ["meter.total"]),
        ("x = meter.mean", ["meter.n"]),
        ("meter()", ["meter.n"]),
        ("net(step)", ["net.calls"]),
        ("parts(step)", ["parts[1].calls"]),
        ("for callback in callbacks:\n    callback()", ["callbacks[1].n", "meter.total"]),
        ("net.train()", []),
        ("Counted.count()", ["Counted.n"]),
        ("Shared.count()", ["Shared.n"]),
        ("of_function()", ["of_function.n"]),
    ],
)
def test_what_the_scripts_functions_carry_is_found(body: str, names: list[str], script: dict[str, Any]) -> None:
    assert carried(body, values=script) == names


# --- small loops at random, compared with what running them reads


class Traced(dict[str, Any]):
    """Variables that note in which step each is bound, and which reads see a value of an earlier step."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.at, self.late = 0, dict[str, int](), set[str]()

    def __getitem__(self, name: str) -> Any:
        self.reads(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.at[name] = self.step
        super().__setitem__(name, value)

    def reads(self, name: str) -> None:
        if 0 < self.at.get(name, 0) < self.step:
            self.late.add(name)


class Held:
    """An object whose attributes are traced as `s.x`."""

    def __init__(self, names: Traced) -> None:
        vars(self)["_names"] = names
        vars(self).update(x=0, y=0)

    def __getattribute__(self, name: str) -> Any:
        if name in ("x", "y"):
            object.__getattribute__(self, "_names").reads(f"s.{name}")
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        names = vars(self)["_names"]
        names.at[f"s.{name}"] = names.step
        vars(self)[name] = value


PLACES = ("a", "b", "c", "s.x", "s.y")
places = st.sampled_from(PLACES)
simple = st.one_of(
    st.builds("{} = {} + 1".format, places, places),
    st.builds("{} += 1".format, places),
    st.builds("{} = step".format, places),
    st.builds("[{0} for {0} in ({1}, 2)]".format, st.sampled_from("ab"), places),
    st.builds("{0} = {1} if step % 2 else {2}".format, places, places, places),
)


def indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    blocks = st.lists(inner, min_size=1, max_size=3).map(indented)
    return st.one_of(
        st.builds("if step % 3 == 0:\n{}\nelse:\n{}".format, blocks, blocks),
        st.builds("if {} > 2:\n{}".format, places, blocks),
        st.builds("for {} in range(step % 2):\n{}".format, st.sampled_from("abc"), blocks),
        st.builds("for d in range(2):\n{}\n    if d == step % 2:\n        break".format, blocks),
        st.builds("try:\n{}\nexcept ValueError:\n{}".format, blocks, blocks),
        st.builds("if step == 2:\n{}\n    continue".format, blocks).filter(lambda text: "for d" not in text),
    )


bodies = st.lists(st.recursive(simple, compound, max_leaves=8), min_size=1, max_size=5).map("\n".join)


def played(body: str) -> tuple[set[str], set[str]]:
    """What some step read that an earlier one had bound; and what was bound at all."""
    names = Traced()
    code = compile("for step in steps:\n" + textwrap.indent(body, "    "), "body", "exec")
    names.update(dict.fromkeys("abc", 0) | {"s": Held(names)})

    def steps() -> Iterator[int]:
        for names.step in range(1, STEPS + 1):
            yield names.step

    names.update(steps=steps())
    exec(code, {}, names)
    return names.late, set(names.at)


@given(bodies)
@settings(max_examples=300, deadline=None, phases=(Phase.explicit, Phase.generate))
@example("if a > 2:\n    b = 1\na = b + 1")
def test_all_that_a_running_loop_carries_is_found(body: str) -> None:
    late, _ = played(body)
    found = carried(body, "", {"s": 0})
    assert late <= set(found), body


@given(st.lists(simple, min_size=1, max_size=6).map("\n".join))
@settings(max_examples=200, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_of_a_loop_without_branches_nothing_else_is_found(body: str) -> None:
    body = "\n".join(line for line in body.splitlines() if " if " not in line) or "a = step"
    late, _ = played(body)
    found = set(carried(body, "", {"s": 0}))
    assert found == late, body


def test_chain_of_hundreds_of_elifs_is_read() -> None:
    arms = "\n".join(f"elif step == {i}:\n    last = {i}" for i in range(1, 900))
    assert carried(f"if step == 0:\n    n += 1\n{arms}\nprint(last)") == ["last", "n"]


ELEMENTS = """
import torch
average, other = [torch.zeros(1)], [torch.ones(1)]
groups = [{"params": average}]
net = torch.nn.Linear(1, 1)
numbers = [1, 2]
"""


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("for a in average:\n    a.mul_(0.9)", ["average"]),
        ("for a in average:\n    a += 1", ["average"]),
        ("for a, b in zip(average, other, strict=True):\n    a.data.mul_(0.9).add_(b)", ["average"]),
        ("for i, a in enumerate(average):\n    a.copy_(step)", ["average"]),
        ("for p in net.parameters():\n    p.data = p.data + step", ["net"]),
        ("for name, p in net.named_parameters():\n    p.add_(step)", ["net"]),
        ("for p in net.state_dict().values():\n    p.copy_(step)", ["net"]),
        ("for group in groups:\n    for p in group['params']:\n        p.add_(step)", ["groups"]),
        ("torch._foreach_lerp_(average, other, 0.1)\nf(average)", ["average"]),
        ("def follow(of):\n    of.add_(step)\nfor a in average:\n    follow(a)", ["average"]),
        ("for p in net.parameters():\n    p.grad = None\n    p.requires_grad = False", []),
        ("for n in numbers:\n    n += 1", []),
        ("for a in average:\n    a = a + 1\n    print(a.sum())", []),
        ("for group in groups:\n    group['lr'] = step", []),
        ("for last in numbers:\n    print(last)\nprint(last)", ["last"]),
        ("for a in average:\n    print(a.add(step))", []),
    ],
)
def test_container_is_carried_if_its_elements_are_changed_in_place(body: str, names: list[str]) -> None:
    assert carried(body, ELEMENTS) == names


@pytest.mark.long
def test_functions_that_call_others_twice_are_read_within_a_bound() -> None:
    calls = "\n".join(f"def f{i}():\n    f{i + 1}()\n    f{i + 1}()" for i in range(40))
    with pytest.raises(TooLarge):
        carried(f"{calls}\nf0()\nn += 1")
