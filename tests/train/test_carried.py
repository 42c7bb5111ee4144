"""What a loop carries in plain variables: found where it reaches what is trained, and nowhere else."""

from __future__ import annotations

import ast
import collections
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep.train.guards.script_text.known_values import constant, held, kind_of
from everstep.train.guards.script_text.loop_carried import PLAIN, LoopCarried, loop_carried
from everstep.train.guards.script_text.scripts import Script, Unknown
from everstep.train.guards.script_text.syntax_patterns import path_of
from everstep.train.guards.script_text.value_origins import SAVED

ROOT = Path(__file__).parents[2]


def found(text: str, values: dict[str, Any]) -> dict[str, str]:
    """Name → what depends on it, in the first loop over steps of the text."""
    tree = ast.parse(textwrap.dedent(text))
    loop = next(n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While) and "step" in ast.unparse(n))
    script = Script(tree, lambda n: kind_of(held(values, n)), lambda n: constant(values, n))
    return {f.name: f.use for f in loop_carried(script, loop)}


WORK = """
    loss = criterion(model(batch.data[0]), batch.data[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def loop(body: str, before: str = "", work: str = WORK) -> str:
    """A loop over steps, whose step does `body` and the usual work."""
    inner = textwrap.indent(textwrap.dedent(body).strip("\n") + "\n" + textwrap.dedent(work), "        ")
    return f"{textwrap.dedent(before)}\nfor step in run.steps(loader, until=9):\n    with step as batch:\n{inner}"


LR = "for group in optimizer.param_groups:\n    group['lr'] = rate\n"

CARRIED: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "counter that sets a rate": (
        loop(f"n += 1\nrate = 0.1 / n\n{LR}"), {"n": 0}, {"n": "a hyperparameter"},
    ),
    "counter that a function sets a rate by": (
        loop("n += 1\nset_rate(optimizer, n)", "def set_rate(o, k):\n    for g in o.param_groups:\n"
             "        g['lr'] = schedule(k)\n"), {"n": 0}, {"n": "a hyperparameter"},
    ),
    "rate that is decayed now and then": (
        loop(f"if step.number in (3, 5):\n    rate *= 0.1\n{LR}"), {"rate": 0.1}, {"rate": "a hyperparameter"},
    ),
    "rate that is set once, in one step": (
        loop(f"if step.number == 3:\n    rate = 0.01\n{LR}"), {"rate": 0.1}, {"rate": "a hyperparameter"},
    ),
    "two variables behind each other": (
        loop("a += 1\nb = b + a\n(loss * b).backward()", work=""), {"a": 0, "b": 0},
        {"a": "the gradients", "b": "the gradients"},
    ),
    "counter that decides whether the optimizer steps": (
        loop("loss(batch).backward()\nn += 1\nif n % 4 == 0:\n    optimizer.step()", work=""), {"n": 0},
        {"n": "optimizer.step()"},
    ),
    "list that the loss is weighted by": (
        loop("loss = f(batch)\n(loss / sum(last)).backward()\nlast.append(loss.item())", work=""), {"last": [1.0]},
        {"last": "the gradients"},
    ),
    "dictionary of numbers": (
        loop("stats['n'] += 1\n(f(batch) * stats['n']).backward()", work=""), {"stats": {"n": 0}},
        {"stats['n']": "the gradients"},
    ),
    "curriculum by a length of its own": (
        loop("length += 1\nf(batch.data[:, :length]).backward()", work=""), {"length": 1}, {"length": "the gradients"},
    ),
    "mean of the losses that a schedule asks for": (
        loop("mean = 0.9 * mean + 0.1 * loss.item()\nplateau.step(mean)", work=""), {"mean": 0.0},
        {"mean": "plateau.step()"},
    ),
    "average that warms up by a count": (
        loop("n += 1\nfor a, p in zip(average.parameters(), model.parameters()):\n"
             "    a.mul_(n / (n + 9)).add_(p)"), {"n": 0}, {"n": "the parameters"},
    ),
    "flag of the first batch": (
        loop("if first:\n    model.load_state_dict(start(batch))\n    first = False"), {"first": True},
        {"first": "model.load_state_dict"},
    ),
    "values of the first batch, by a flag": (
        loop("if first:\n    mean = batch.data.mean()\n    first = False\nf(batch.data - mean).backward()", work=""),
        {"first": True}, {"first": "the gradients"},
    ),
    "patience in an object": (
        "class Stopper:\n    def __init__(self):\n        self.best, self.waited, self.stop = 9.0, 0, False\n"
        "    def step(self, loss):\n        if loss < self.best:\n            self.best, self.waited = loss, 0\n"
        "        else:\n            self.waited += 1\n        self.stop = self.waited > 3\n"
        + loop("stopper.step(f(batch))\nif stopper.stop:\n    break"),
        {"stopper": type("Stopper", (), {})()}, {},
    ),
    "nonlocal of a closure": (
        loop("def closure():\n    nonlocal calls\n    calls += 1\n    loss = f(batch) * calls\n    loss.backward()\n"
             "    return loss\noptimizer.step(closure)", work=""), {"calls": 0}, {"calls": "the gradients"},
    ),
    "end of the loop by a count": (
        loop("n += 1\nif n > 7:\n    sys.exit()"), {"n": 0}, {"n": "whether the loop ends"},
    ),
    "index of an enumeration": (
        "for i, step in enumerate(run.steps(loader, until=9)):\n    with step as batch:\n"
        "        optimizer.param_groups[0]['lr'] = 0.1 / (i + 1)\n", {}, {"i": "a hyperparameter"},
    ),
    "steps that are taken by next": (
        "while True:\n    step = next(steps)\n    with step as batch:\n        n += 1\n"
        "        (f(batch) * n).backward()\n",
        {"n": 0}, {"n": "the gradients"},
    ),
    "attribute of a trainer": (
        "class Trainer:\n    def fit(self):\n        for step in self.run.steps():\n            with step as batch:\n"
        "                self.train(batch)\n    def train(self, batch):\n        self.n += 1\n"
        "        (self.model(batch) * self.weight()).backward()\n"
        "    def weight(self):\n        return min(1, self.n / 9)\n",
        {"self": type("Trainer", (), {})()}, {"self.n": "the gradients"},
    ),
    "step that is left out by a mean of norms": (
        loop("mean = 0.9 * mean + norm(model)\nloss(batch).backward()\nif norm(model) > 9 * mean:\n    continue\n"
             "optimizer.step()", work=""), {"mean": 0.0}, {"mean": "optimizer.step()"},
    ),
    "collective by a count": (
        loop("n += 1\nif n % 5 == 0:\n    dist.all_reduce(total)"), {"n": 0},
        {"n": "whether dist.all_reduce is called"},
    ),
    "loss that is an object": (
        "class Weighted:\n    def __init__(self):\n        self.mean = 1.0\n    def __call__(self, x):\n"
        "        self.mean = 0.9 * self.mean + x.item()\n        return x / self.mean\n"
        + loop("weighted(f(batch)).backward()", work=""), {"weighted": type("Weighted", (), {"__init__": None})},
        {"weighted.mean": "the gradients"},
    ),
    "method of a base class": (
        "class Base:\n    def advance(self):\n        self.n += 1\n        return self.n\n"
        "class Warmup(Base):\n    pass\n"
        + loop(f"rate = 0.1 / warmup.advance()\n{LR}"), {"warmup": type("Warmup", (), {})()},
        {"warmup.n": "a hyperparameter"},
    ),
    "own state with a step": (
        loop(f"state.step += 1\nrate = 0.1 / state.step\n{LR}"), {"state": SimpleNamespace(step=0)},
        {"state.step": "a hyperparameter"},
    ),
    "rate that is lowered once, by its old value": (
        loop("if step.number >= 5 and not low:\n    for group in optimizer.param_groups:\n        group['lr'] *= 0.1\n"
             "    low = True"), {"low": False}, {"low": "a hyperparameter"},
    ),
    "clipping by the norms so far": (
        loop("norms.append(norm(model))\nclip_grad_norm_(model.parameters(), sum(norms) / len(norms))"), {"norms": []},
        {"norms": "the parameters"},
    ),
    "count in a list": (
        loop("n[0] += 1\n(f(batch) * n[0]).backward()", work=""), {"n": [0]}, {"n[0]": "the gradients"},
    ),
    "groups that are updated": (
        loop("n += 1\nfor g in optimizer.param_groups:\n    g.update(lr=0.1 / n)"), {"n": 0}, {"n": "a hyperparameter"},
    ),
    "first features of each class": (
        loop("x = features(batch)\nif name not in first:\n    first[name] = x\n(x - first[name]).backward()", work=""),
        {"first": {}}, {"first": "the gradients"},
    ),
    "what was seen before": (
        loop("k = key(batch)\nloss = f(batch)\nif k not in seen:\n    seen[k] = True\n    loss = loss * 2\n"
             "loss.backward()", work=""), {"seen": {}}, {"seen": "the gradients"},
    ),
    "counts by key": (
        loop("k = key(batch)\ncounts[k] = counts.get(k, 0) + weight(k)\n(f(batch) / counts[k]).backward()", work=""),
        {"counts": {}}, {"counts": "the gradients"},
    ),
    "best model in a file": (
        loop("value = f(batch)\nif value < best:\n    best = value\n    torch.save(model, 'best.pt')"), {"best": 9.0},
        {"best": SAVED},
    ),
    "best model by a copy of the file": (
        loop("value = f(batch)\nkeep(model, value > best)\nbest = max(value, best)", "def keep(model, is_best):\n"
             "    torch.save(model, 'last.pt')\n    if is_best:\n        shutil.copyfile('last.pt', 'best.pt')\n"),
        {"best": 0.0}, {"best": SAVED},
    ),
}  # fmt: skip
CARRIED["loss that is an object"][1]["weighted"] = type("Weighted", (), {})()
CARRIED["loss that is an object"][1]["weighted"].__dict__.update(mean=1.0)
CARRIED["method of a base class"][1]["warmup"].__dict__.update(n=0)
CARRIED["patience in an object"][1]["stopper"].__dict__.update(best=9.0, waited=0, stop=False)
CARRIED["patience in an object"][2].update(
    {"stopper.best": "whether the loop ends", "stopper.waited": "whether the loop ends"}
)
CARRIED["attribute of a trainer"][1]["self"].__dict__.update(n=0)

HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "sums for a log": (
        loop("total += loss.item()\nseen += len(batch.data)\nif seen > 50:\n    print(total / seen)\n"
                         "    total = seen = 0"), {"total": 0.0, "seen": 0},
    ),
    "list of losses that is cut": (
        loop("losses.append(loss.item())\nif len(losses) > 99:\n    losses = losses[-99:]\nprint(sum(losses))"),
        {"losses": []},
    ),
    "best that is printed": (loop("best = min(best, loss.item())\nbar.set_postfix(best=best)"), {"best": 9.0}),
    "count for a writer": (
        loop("n += 1\nwriter.add_scalar('loss', loss.item(), n)\nif n % 9 == 0:\n    evaluate(model)"), {"n": 0},
    ),
    "timer": (loop("now = time.time()\nif now - last > 9:\n    print(now)\n    last = now"), {"last": 0.0}),
    "mask that is made once": (
        loop("if mask is None:\n    mask = torch.ones(batch.data.shape[1])\n(f(batch.data) * mask).sum().backward()",
             work=""), {"mask": None},
    ),
    "mask that is made once, by a flag": (
        loop("if not made:\n    mask = torch.ones(4)\n    made = True\n(f(batch) * mask).backward()", work=""),
        {"mask": None, "made": False},
    ),
    "mask that grows with the longest batch": (
        loop("if size < batch.data.shape[1]:\n    size = batch.data.shape[1]\n    mask = torch.ones(size)\n"
             "(f(batch) * mask).backward()", work=""), {"mask": None, "size": 0},
    ),
    "bound anew in each step": (loop("scale = 1.0\nif hard(batch):\n    scale = 2.0\n(f(batch) * scale).backward()",
                                     work=""), {"scale": 1.0}),
    "name that the log uses again": (
        loop("loss = f(batch)\nloss.backward()\nloss = mean = 0.9 * mean + 0.1 * loss.item()\nprint(loss)", work=""),
        {"mean": 0.0, "loss": 0.0},
    ),
    "sum of the micro-batches of one step": (
        "for step in run.steps():\n    with step as batches:\n        for i, b in enumerate(batches):\n"
        "            if i == 0:\n                total = 0\n            total = total + f(b)\n"
        "        total.backward()\n",
        {},
    ),
    "loss of the last micro-batch": (
        "for step in run.steps():\n    with step as batches:\n        for b in batches:\n            loss = f(b)\n"
        "            loss.backward()\n        print(loss)\n", {"loss": None},
    ),
    "rate by the step's number": (
        loop(f"if step.number >= 5:\n    rate = 0.01\n{LR}"), {"rate": 0.1},
    ),
    "masks that are kept by their lengths": (
        loop("f(batch.data, mask_of(batch.lengths.max().item())).backward()",
             "import torch\ndef mask_of(n):\n    if n not in masks:\n        masks[n] = torch.tril(torch.ones(n, n))\n"
             "    return masks[n]\n", work=""), {"masks": {}},
    ),
    "masks that are asked for by get, and by an error": (
        loop("f(batch.data, mask_of(batch.data.shape[1]), place_of(batch.data.shape[1])).backward()",
             "import torch\ndef mask_of(n):\n    mask = masks.get(n)\n    if mask is None:\n"
             "        mask = masks[n] = torch.ones(n)\n    return mask\n"
             "def place_of(n):\n    try:\n        return places[n]\n    except KeyError:\n"
             "        places[n] = torch.arange(n)\n        return places[n]\n", work=""),
        {"masks": {}, "places": {}},
    ),
    "rates that are kept by the step's number": (
        loop("for g in optimizer.param_groups:\n    g['lr'] = rate_of(step.number)",
             "import math\ndef rate_of(n):\n    if n in rates:\n        return rates[n]\n    rate = math.cos(n)\n"
             "    rates[n] = rate\n    return rate\n"), {"rates": {}},
    ),
    "warning that is given once": (
        loop("if not warned and bad(batch):\n    warned = True\n    print('bad')"), {"warned": False},
    ),
    "count of batches that failed": (
        loop("try:\n    check(batch)\nexcept ValueError:\n    failed += 1\n    if failed > 9:\n        raise"),
        {"failed": 0},
    ),
    "parameter of a function that is bound there": (
        loop("shift = scaled(shift)\nprint(shift)\nf(batch, scaled(weight)).backward()",
             "def scaled(x):\n    x = x * 2\n    return x\n", work=""), {"shift": 1.0, "weight": 1.0},
    ),
    "patience that is switched off": (
        loop("if args.patience:\n    waited += 1\n    if waited > args.patience:\n        break"),
        {"waited": 0, "args": SimpleNamespace(patience=0)},
    ),
    "meter in an object": (
        "class Meter:\n    def update(self, x):\n        self.sum += x\n        self.count += 1\n"
        "        self.mean = self.sum / self.count\n"
        + loop("meter.update(loss.item())\nprint(meter.mean)"), {"meter": type("Meter", (), {"__init__": None})},
    ),
    "profiler": (loop("n += 1\nif n > 3:\n    prof.step()"), {"n": 0, "prof": object()}),
    "optimizer that is made later": (
        loop("if step.number == 3:\n    second = torch.optim.Adam(p)\nif second is not None:\n    second.step()"),
        {"second": None},
    ),
    "tensors, which the census watches": (
        loop("state['h'] = f(state['h'])\nstate['h'].sum().backward()"), {"state": {"h": torch.zeros(2)}},
    ),
    "losses by name, which each step writes anew": (
        loop("losses['a'] = f(batch)\nlosses['b'] = g(batch)\nsum(losses.values()).backward()", work=""),
        {"losses": {}},
    ),
    "losses by name that a function collects": (
        loop("logs = step_losses(batch)\nlogs['all'].backward()\nhistory.append(logs['all'].item())",
             "def step_losses(b):\n    d = {}\n    d['a'] = f(b)\n    d['all'] = d['a'] + g(b)\n    return d\n",
             work=""),
        {"history": [], "logs": {}},
    ),
    "step that is left out by the batch": (
        loop("if bad(batch):\n    skipped += 1\n    continue\nloss(batch).backward()", work=""), {"skipped": 0},
    ),
    "default that is taken once": (loop(f"rate = rate or 0.1\n{LR}"), {"rate": None}),
    "layers that are thawed once": (
        loop("if step.number >= 5 and not thawed:\n    model.requires_grad_(True)\n    thawed = True"),
        {"thawed": False},
    ),
    "rate that is set once, and again by a new process": (
        loop("if step.number >= 5 and not low:\n    for group in optimizer.param_groups:\n        group['lr'] = 0.01\n"
             "    low = True"), {"low": False},
    ),
    "second loader's iterator": (
        loop("try:\n    x = next(others)\nexcept StopIteration:\n    others = iter(more)\n    x = next(others)\n"
             "print(f(x))"), {"others": iter([])},
    ),
    "flag that all ranks reduce": (
        loop("stop = [f(batch)]\ndist.broadcast_object_list(stop)\nif stop[0]:\n    break"), {"stop": [None]},
    ),
    "losses of two alternating optimizers": (
        loop("if step.number % 2:\n    a = f(batch)\n    a.backward()\n    first.step()\nelse:\n    b = g(batch)\n"
             "    b.backward()\n    second.step()\nprint(a, b)", work=""), {"a": 0.0, "b": 0.0},
    ),
    "tracked dictionary's own": (loop("f(batch).backward()\ndone.append(step.number)"), {"done": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_variable_that_reaches_training_is_found_with_what_depends_on_it(name: str) -> None:
    text, values, wanted = CARRIED[name]
    assert found(text, values) == wanted


@pytest.mark.parametrize("name", HARMLESS)
def test_variable_that_reaches_no_training_is_not_found(name: str) -> None:
    text, values = HARMLESS[name]
    assert found(text, values) == {}


def test_findings_name_the_lines() -> None:
    text = loop(f"n += 1\nrate = 0.1 / n\n{LR}")
    tree = ast.parse(text)
    (one,) = loop_carried(Script(tree, {"n": "int"}.get), tree.body[0])
    lines = text.splitlines()
    assert (lines[one.line - 1].strip(), lines[one.at - 1].strip()) == ("n += 1", "group['lr'] = rate")


def test_script_without_end_is_given_up_and_not_refused() -> None:
    body = "\n".join(f"n = n + {i}" for i in range(20_000))
    tree = ast.parse(loop(f"{body}\n(f(batch) * n).backward()", work=""))
    assert loop_carried(Script(tree, {"n": "int"}.get), tree.body[0]) == []


# All scripts of the repository that train: those that are refused by this, and by which names.
REFUSED = {
    "ordinary/scripts/best_weights.py": ["best"],
    "ordinary/scripts/early_stop_by_patience.py": ["best", "waited"],
    "ordinary/scripts/early_stop_by_object.py": ["patience.best", "patience.waited"],
    "ordinary/scripts/first_loss.py": ["first"],
    "ordinary/scripts/history_rebound.py": ["recent"],
    "ordinary/scripts/lengths_seen.py": ["seen"],
    "ordinary/scripts/normalised_by_first_batch.py": ["deviation", "mean"],
    "ordinary/scripts/options_counted.py": ["options['taken']"],
    "ordinary/scripts/rate_by_own_counter.py": ["global_step"],
    "ordinary/scripts/recent_losses.py": ["recent"],
    "ordinary/scripts/replay_buffer.py": ["recent"],
    "ordinary/scripts/warmup_object.py": ["warmup.taken"],
}
FOLDERS = ("tests/ordinary/scripts", "tests/ordinary/public", "tests/train/strangers", "examples")


def test_of_all_scripts_of_the_repository_only_those_that_carry_something_are_found() -> None:
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = dict[str, list[str]]()
    loops = 0
    for path in files:
        tree = ast.parse(path.read_text())
        for n in ast.walk(tree):
            if isinstance(n, ast.For) and _is_over_steps(n.iter):
                loops += 1
                written = Written(tree, n)
                lost = [
                    f for f in loop_carried(Script(tree, written.kind, known=written), n) if not written.is_tracked(f)
                ]
                if lost:
                    names[str(path.relative_to(ROOT / "tests"))] = [f.name for f in lost]
    assert loops > 150
    assert names == REFUSED


def _is_over_steps(e: ast.expr) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in ("steps", "epochs") for n in ast.walk(e))


class Written(Unknown):
    """What a script's variables hold before its loop, as far as its text says it."""

    def __init__(self, tree: ast.Module, loop: ast.For) -> None:
        self._values: dict[str, ast.expr] = {}
        tracks = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and (path_of(n.func) or "").endswith("track")]
        self._tracked = {path_of(k.value) for n in tracks for k in n.keywords}
        self._own = dict[str, str]()  # of self, where the loop is in a method
        for n in ast.walk(tree):
            if isinstance(n, ast.ClassDef) and any(part is loop for part in ast.walk(n)):
                self._own["self"] = n.name
            if isinstance(n, ast.Assign) and (n.lineno < loop.lineno or isinstance(n.targets[0], ast.Attribute)):
                for target in n.targets:
                    self._bind(target, n.value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for t, v in zip(target.elts, parts, strict=True):
                self._bind(t, v)
        elif (path := path_of(target)) is not None:
            self._values.setdefault(path, value)

    def is_tracked(self, one: LoopCarried) -> bool:
        """What is bound to another object no longer is."""
        root = re.split(r"[.\[]", one.name, maxsplit=1)[0]
        within = any(one.name.startswith((f"{t}.", f"{t}[")) for t in self._tracked if t is not None)
        return (root in self._tracked or within) and not (one.bound and one.name == root)

    def is_frozen(self, name: str) -> bool:
        value = self._values.get(name)
        return value is not None and "requires_grad_(False)" in ast.unparse(value)

    def kind(self, name: str) -> str | None:
        if name in self._own:
            return self._own[name]
        first, dot, rest = name.partition(".")
        match self._values.get(name) or (self._values.get(f"self.{rest}") if dot and self.kind(first) else None):
            case ast.Constant(value=value):
                return type(value).__name__
            case ast.List() | ast.ListComp():
                return "list"
            case ast.Dict(values=values):
                return "object" if any(isinstance(v, ast.Call) for v in values) else "dict"
            case ast.BinOp() | ast.UnaryOp() as made if not any(isinstance(n, ast.Name) for n in ast.walk(made)):
                return "float"
            case ast.Call(func=func):
                name = (path_of(func) or "").rpartition(".")[2]
                return name if name in PLAIN or name[:1].isupper() else "object"
        return None


def test_class_of_a_value_is_told_without_calling_the_script() -> None:
    class Stranger:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    values = {"a": 1.5, "b": collections.deque([1]), "c": [torch.zeros(1)], "d": Stranger(), "e": None}
    assert {n: kind_of(held(values, n)) for n in (*values, "d.x", "z")} == {
        "a": "float", "b": "deque", "c": "object", "d": "Stranger", "e": "NoneType", "d.x": None, "z": None,
    }  # fmt: skip
