"""State in places that a script's variables only lead to, and that no commit has, is read under a name."""

from __future__ import annotations

import argparse
import array
import asyncio
import calendar
import codecs
import contextvars
import csv
import ctypes
import dataclasses
import decimal
import fractions
import functools
import importlib
import io
import itertools
import logging
import math
import multiprocessing
import optparse
import os
import pathlib
import pprint
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import types
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parameter import Parameter
from torch.utils.data import BatchSampler

from everstep.data import ElasticLoader
from everstep.rehearse.cache_counts import CacheCounts
from everstep.rehearse.elsewhere import elsewhere, set_on_objects
from everstep.rehearse.held_tensors import held_tensors
from everstep.rehearse.not_read import NotRead
from everstep.train.guards import script_objects
from everstep.train.guards.plain_values import Roots, plain_values

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_other_tests")]

Read = dict[str, str]
Row = tuple[dict[str, Any], dict[str, Any], Callable[[], Any], str]  # variables, tracked, a change, the name it has


class Baseline:
    __slots__ = ("__mean", "burn_in")

    def __init__(self) -> None:
        self.__mean, self.burn_in = 0.0, 3

    def feed(self) -> None:
        self.__mean += 1.0


class Annealer:
    """Its `state_dict` forgets the counter."""

    def __init__(self) -> None:
        self.weight, self.calls, self.centre, self.order = 1.0, 0, torch.zeros(2), np.random.default_rng(1)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


class Lookback(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        return super().step(closure)


class Smooth(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        pass


class Array(np.ndarray[Any, Any]):
    pass


class Local(threading.local):
    pass


class Noisy(torch.utils.data.Dataset[int]):
    """Of which a loader has the only reference."""

    def __init__(self) -> None:
        self.made = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        self.made += 1
        return i


class Masking:
    def __init__(self) -> None:
        self.made = 0

    def __call__(self, rows: list[Any]) -> list[Any]:
        self.made += 1
        return rows


def annealed() -> Callable[[], int]:
    count = 0

    def weight() -> int:
        nonlocal count
        count += 1
        return count

    return weight


def kept() -> Callable[[], None]:
    average = torch.zeros(2)

    def feed() -> None:
        average.add_(1)

    return feed


class Metric:
    def __init__(self) -> None:
        self.count = 0

    def feed(self) -> None:
        self.count += 1


class Loop:
    def __init__(self) -> None:
        self.count, self.on_begin, self.on_end = 0, Metric().feed, Metric().feed


def slots() -> Row:
    baseline = Baseline()
    return {"baseline": baseline}, {}, baseline.feed, "baseline._Baseline__mean"


def forgotten() -> Row:
    kl = Annealer()
    return {"kl": kl}, {"kl": kl}, lambda: setattr(kl, "calls", 1), "kl.calls"


def forgotten_without_a_name() -> Row:
    kl = Annealer()
    return {}, {"penalty": kl}, lambda: setattr(kl, "calls", 1), "penalty.calls"


def forgotten_tensor() -> Row:
    kl = Annealer()
    return {"kl": kl}, {"kl": kl}, lambda: kl.centre.add_(1), "kl.centre"


def forgotten_generator() -> Row:
    kl = Annealer()
    return {"kl": kl}, {"kl": kl}, kl.order.random, "kl.order"


def of_optimizer() -> Row:
    optimizer = Lookback([Parameter(torch.zeros(1))])
    return {"opt": optimizer}, {"opt": optimizer}, optimizer.step, "opt.taken"


def set_on_optimizer() -> Row:
    optimizer: Any = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1)
    optimizer.taken = 0
    return {"opt": optimizer}, {"opt": optimizer}, lambda: setattr(optimizer, "taken", 1), "opt.taken"


def on_library_module(tracked: bool) -> Row:
    net: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    net[0].seen = 0
    return {"net": net}, {"model": net} if tracked else {}, lambda: setattr(net[0], "seen", 1), "net.0.seen"


def tensor_on_library_module() -> Row:
    net: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    net[0]._mean = torch.zeros(2)
    return {"net": net}, {"model": net}, lambda: setattr(net[0], "_mean", torch.ones(2)), "net.0._mean"


def extra_state() -> Row:
    net: Any = torch.nn.Sequential(Smooth())
    return {"net": net}, {"model": net}, lambda: setattr(net[0], "seen", 1), "net.0.seen"


def on_parameter(tracked: bool) -> Row:
    net: Any = torch.nn.Linear(2, 2)
    net.weight.calls = 0
    return {"net": net}, {"model": net} if tracked else {}, lambda: setattr(net.weight, "calls", 1), "net.weight.calls"


def on_tensor() -> Row:
    x: Any = torch.zeros(2)
    x.calls = 0
    return {"x": x}, {}, lambda: setattr(x, "calls", 1), "x.calls"


def on_array() -> Row:
    x: Any = np.zeros(2).view(Array)
    x.calls = 0
    return {"x": x}, {}, lambda: setattr(x, "calls", 1), "x.calls"


def two_closures() -> Row:
    weights = {"evaluated": annealed(), "consistency": annealed()}
    return {"weights": weights}, {}, weights["consistency"], "weights['consistency'].count"


def two_closures_of_tensors() -> Row:
    averages = {"a": kept(), "b": kept()}
    return {"averages": averages}, {}, averages["b"], "averages['b'].average"


def closure_under_a_variables_name() -> Row:
    weight = annealed()
    return {"count": 0, "weight": weight}, {}, weight, "weight.count"


def two_methods() -> Row:
    loop = Loop()
    return {"loop": loop}, {}, loop.on_end, "loop.on_end.__self__.count"


def two_numbers() -> Row:
    weight, twin = annealed(), annealed()
    own: dict[str, Any] = {"weight": weight, "twin": twin}
    return own, {}, twin, "twin.count"


def hook_on_module(tracked: bool) -> Row:
    net, hook = torch.nn.Sequential(torch.nn.Linear(2, 2)), annealed()
    net[0].register_forward_hook(lambda *_: None)
    net[0].register_forward_pre_hook(lambda *_: hook() and None)
    return {"net": net}, {"model": net} if tracked else {}, lambda: net(torch.zeros(2)), "count"


def hook_on_parameter() -> Row:
    net, hook = torch.nn.Linear(2, 2), annealed()
    net.weight.register_hook(lambda _: hook() and None)
    return {"net": net}, {"model": net}, lambda: net(torch.ones(2)).sum().backward(), "count"


def hook_of_an_object() -> Row:
    net, metric = torch.nn.Linear(2, 2), Metric()
    net.weight.register_post_accumulate_grad_hook(lambda _: metric.feed())
    return {"net": net}, {"model": net}, lambda: net(torch.ones(2)).sum().backward(), "metric.count"


def hook_on_optimizer() -> Row:
    optimizer, hook = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1), annealed()
    optimizer.register_step_pre_hook(lambda *_: hook() and None)  # type: ignore[arg-type]
    return {"opt": optimizer}, {"opt": optimizer}, optimizer.step, "count"


def function_of_a_schedule() -> Row:
    rate = annealed()
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1), lambda _: rate())
    return {}, {"schedule": schedule}, rate, "count"


def of_a_loader() -> Row:
    loader = ElasticLoader(Noisy(), global_batch=2, rank=0, world_size=1)
    return {}, {"data": loader}, lambda: next(iter(loader)), "run.loader(…)._dataset.made"


def collation_of_a_loader() -> Row:
    loader = ElasticLoader(Noisy(), global_batch=2, rank=0, world_size=1, collate_fn=Masking())
    return {}, {"data": loader}, lambda: next(iter(loader)), "run.loader(…)._options['collate_fn'].made"


def setting_of_a_module(tracked: bool) -> Row:
    net = torch.nn.Sequential(torch.nn.Dropout(0.0))
    return {"net": net}, {"model": net} if tracked else {}, lambda: setattr(net[0], "p", 0.1), "net.0.p"


def buffer_that_is_not_saved() -> Row:
    net = torch.nn.Sequential(torch.nn.Identity())
    net[0].register_buffer("seen", torch.tensor(0), persistent=False)
    return {"net": net}, {"model": net}, lambda: net[0].seen.add_(1), "net.0.seen"


def of_a_base_class(metaclass: bool) -> Row:
    class Meta(type):
        made = 0

    class Base(metaclass=Meta):
        drawn = 0

    class Mixup(Base):
        pass

    owner: Any = Meta if metaclass else Base
    name = "made" if metaclass else "drawn"
    return {"mixup": Mixup()}, {}, lambda: setattr(owner, name, 1), f"{owner.__name__}.{name}"


def counting(method: Any) -> Any:
    done = 0

    @functools.wraps(method)
    def inner(*args: Any) -> Any:
        nonlocal done
        done += 1
        return method(*args)

    return inner


class Objective:
    criterion, average = Smooth(), torch.zeros(2)

    @counting
    def weigh(self) -> None:
        pass

    def recall(self, seen: list[int] = [0]) -> None:  # noqa: B006
        seen[0] += 1

    @staticmethod
    def collect(seen: list[int] = [0]) -> None:  # noqa: B006
        seen[0] += 1


def of_a_class(change: Callable[[Any], Any], name: str) -> Callable[[], Row]:
    def row() -> Row:
        objective = Objective()
        return {"objective": objective}, {}, lambda: change(objective), name

    return row


def class_alone() -> Row:
    return {"Objective": Objective}, {}, Objective().weigh, "done"


def module_that_the_script_has_made() -> Row:
    settings: Any = types.ModuleType("settings")
    settings.stage = 0
    return {"settings": settings}, {}, lambda: setattr(settings, "stage", 1), "settings.stage"


def loss_with_its_graph() -> Row:
    x, past = torch.ones(2, requires_grad=True), types.SimpleNamespace(loss=torch.zeros(()))
    past.loss = x.sum()
    return {"past": past}, {}, lambda: setattr(past, "loss", 2 * x.sum()), "past.loss"


def lines() -> Any:
    return io.TextIOWrapper(rows())


def rows() -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115  it is closed with the process
    file.write(b"a\nb\n" * 9)
    file.seek(0)
    return file


def fitted() -> Any:
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415 - seconds

    return StandardScaler().partial_fit([[0.0]])


def held(x: Any, change: Callable[[Any], Any], name: str) -> Callable[[], Row]:
    def row() -> Row:
        value = x()
        return {"x": value}, {}, lambda: change(value), name

    return row


def cached() -> Any:
    @functools.lru_cache
    def drawn(k: int) -> float:
        return k * float(torch.rand(()))

    return drawn


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain: float = 1.0
        self.seen: list[int] = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gain *= 0.5
        self.seen.append(1)
        return x * self.gain


def compiled(tracked: bool, name: str) -> Row:
    net = torch.jit.script(torch.nn.Sequential(Scaled()))
    return {"net": net}, {"model": net} if tracked else {}, lambda: net(torch.ones(1)), name


def class_of_exec() -> Row:
    scope: dict[str, Any] = {}
    exec("class Ticks:\n    done = 0", scope)
    return {"ticks": scope["Ticks"]()}, {}, lambda: setattr(scope["Ticks"], "done", 1), "Ticks.done"


def taken_from() -> queue.SimpleQueue[int]:
    line = queue.SimpleQueue[int]()
    line.put(0)
    line.get()
    return line


GAIN = contextvars.ContextVar("gain", default=1.0)
GAIN.set(1.0)
MODULE = torch.nn.Linear(1, 1)
METRIC = Metric()


def read_by_codec() -> codecs.StreamReaderWriter:
    return codecs.StreamReaderWriter(io.BytesIO(b"a\nb"), codecs.getreader("utf-8"), codecs.getwriter("utf-8"))


def opened_in_archive() -> Any:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("gains", "1 2 3")
    return zipfile.ZipFile(packed).open("gains")


ROWS: dict[str, Callable[[], Row]] = {
    "private slot": slots,
    "field that a state_dict forgets": forgotten,
    "field of an object that no variable has": forgotten_without_a_name,
    "tensor that a state_dict forgets": forgotten_tensor,
    "generator that a state_dict forgets": forgotten_generator,
    "attribute of a subclass of an optimizer": of_optimizer,
    "attribute set on an optimizer": set_on_optimizer,
    "attribute set on a tracked module of torch": functools.partial(on_library_module, True),
    "attribute set on a module of torch": functools.partial(on_library_module, False),
    "tensor set on a tracked module of torch": tensor_on_library_module,
    "attribute beside an extra state": extra_state,
    "attribute of a tracked parameter": functools.partial(on_parameter, True),
    "attribute of a parameter": functools.partial(on_parameter, False),
    "attribute of a tensor": on_tensor,
    "attribute of an array": on_array,
    "variable of the second closure": two_closures,
    "tensor of the second closure": two_closures_of_tensors,
    "variable of a closure that is equal at first": two_numbers,
    "closure's variable with another variable's name": closure_under_a_variables_name,
    "object of the second method": two_methods,
    "Queue": held(queue.Queue, lambda x: x.put(1), "x.queue"),
    "LifoQueue": held(queue.LifoQueue, lambda x: x.put(1), "x.queue"),
    "PriorityQueue": held(queue.PriorityQueue, lambda x: x.put(1), "x.queue"),
    "number by an address": held(lambda: {id(MODULE): 0}, lambda x: x.update({id(MODULE): 1}), "x[id 0]"),
    "tensor by an address": held(lambda: {id(MODULE): torch.zeros(2)}, lambda x: x[id(MODULE)].add_(1), "x"),
    "numbers by many addresses": held(
        lambda: {2**46 + i: 0 for i in range(40)}, lambda x: x.update({2**46 + 7: 1}), "x"),
    "SimpleQueue": held(taken_from, lambda x: x.put(1), "x.queue"),
    "number of a tracked module of TorchScript": functools.partial(compiled, True, "net.0.gain"),
    "list of a module of TorchScript": functools.partial(compiled, False, "net.0.seen"),
    "class that exec makes": class_of_exec,
    "another context": held(
        contextvars.copy_context, lambda x: x.run(GAIN.set, 2.0), "x['gain']"),
    "ContextVar": held(lambda: contextvars.ContextVar("x", default=1.0), lambda x: x.set(2.0), "x.get()"),
    "multiprocessing.Value": held(
        lambda: multiprocessing.Value("i", 0), lambda x: setattr(x, "value", 1), "x.value"),
    "multiprocessing.Array": held(
        lambda: multiprocessing.Array("d", 2), lambda x: x.__setitem__(0, 1.0), "x[:]"),
    "ctypes": held(lambda: ctypes.c_int(0), lambda x: setattr(x, "value", 1), "x.value"),
    "WeakKeyDictionary": held(
        weakref.WeakKeyDictionary[Any, int], lambda x: x.update({MODULE: x.get(MODULE, 0) + 1}), "x.data"),
    "value of a WeakKeyDictionary": held(
        lambda: weakref.WeakKeyDictionary({MODULE: 0}), lambda x: x.update({MODULE: 1}), "x.data[0]"),
    "WeakValueDictionary": held(
        lambda: weakref.WeakValueDictionary({"a": MODULE}), lambda x: x.pop("a"), "x.data"),
    "WeakSet": held(weakref.WeakSet[Any], lambda x: x.add(MODULE), "x.data"),
    "threading.local": held(
        lambda: vars(local := threading.local()).update(n=0) or local, lambda x: setattr(x, "n", 1), "x.n"),
    "StringIO": held(io.StringIO, lambda x: x.write("a"), "x.getvalue()"),
    "BytesIO": held(io.BytesIO, lambda x: x.write(b"a"), "x.getvalue()"),
    "position in a StringIO": held(lambda: io.StringIO("a\nb"), next, "x.tell()"),
    "position in a BytesIO": held(lambda: io.BytesIO(b"a\nb"), next, "x.tell()"),
    "csv.DictReader": held(lambda: csv.DictReader(["a", "1", "2"]), next, "x.reader.line_num"),
    "Event": held(threading.Event, lambda x: x.set(), "x.is_set()"),
    "position in a file of an archive": held(opened_in_archive, lambda x: x.read(1), "x.tell()"),
    "position of a codec": held(read_by_codec, lambda x: x.read(1), "x.stream.tell()"),
    "nditer": held(lambda: np.nditer(np.zeros(3)), lambda x: [next(x), next(x)], "x.iterindex"),
    "flat array": held(lambda: np.zeros(3).flat, next, "x.index"),
    "optparse.Values": held(lambda: optparse.Values({"seen": 0}), lambda x: setattr(x, "seen", 1), "x.seen"),
    "LoggerAdapter": held(
        lambda: logging.LoggerAdapter(logging.getLogger("x"), {"seen": 0}), lambda x: x.extra.update(seen=1),
        "x.extra['seen']"),
    "memoryview": held(lambda: memoryview(bytearray(2)), lambda x: x.__setitem__(0, 1), "x.tobytes()"),
    "cell": held(lambda: types.CellType(0), lambda x: setattr(x, "cell_contents", 1), "x.cell_contents"),
    "lru_cache": held(cached, lambda x: x(1), "x.cache_info().misses"),
    "bit generator": held(lambda: np.random.PCG64(1), lambda x: x.random_raw(), "x"),
    "seed sequence": held(lambda: np.random.SeedSequence(1), lambda x: x.spawn(1), "x.n_children_spawned"),
    "hook on a tracked module": functools.partial(hook_on_module, True),
    "hook on a module": functools.partial(hook_on_module, False),
    "hook on a parameter": hook_on_parameter,
    "object of a hook on a parameter": hook_of_an_object,
    "hook on an optimizer": hook_on_optimizer,
    "function of a schedule": function_of_a_schedule,
    "dataset that a loader alone has": of_a_loader,
    "collate function that a loader alone has": collation_of_a_loader,
    "dropout of a tracked module": functools.partial(setting_of_a_module, True),
    "dropout of a module": functools.partial(setting_of_a_module, False),
    "buffer that is not saved": buffer_that_is_not_saved,
    "attribute of a base class": functools.partial(of_a_base_class, False),
    "attribute of a metaclass": functools.partial(of_a_base_class, True),
    "closure of a decorated method": of_a_class(lambda x: x.weigh(), "done"),
    "closure of a method of a class": class_alone,
    "default of a method": of_a_class(lambda x: x.recall(), "Objective.recall.__defaults__[0][0]"),
    "default of a static method": of_a_class(lambda x: x.collect(), "Objective.collect.__defaults__[0][0]"),
    "module as attribute of a class": of_a_class(
        lambda x: setattr(x.criterion, "seen", x.criterion.seen + 1), "Objective.criterion.seen"),
    "tensor as attribute of a class": of_a_class(lambda x: x.average.add_(1), "Objective.average"),
    "make_dataclass": held(
        dataclasses.make_dataclass("Progress", [("batches", int, 0)]), lambda x: setattr(x, "batches", 1), "x.batches"),
    "module that the script has made": module_that_the_script_has_made,
    "loss with its graph": loss_with_its_graph,
    "asyncio.Queue": held(asyncio.Queue, lambda x: x.put_nowait(1), "x._queue"),
    "object behind a weak reference": held(lambda: weakref.ref(METRIC), lambda x: x().feed(), "x().count"),
    "file that is read": held(lines, lambda x: x.readline(), "x.tell()"),
    "file of bytes that is read": held(rows, lambda x: x.readline(), "x.tell()"),
    "csv.reader": held(lambda: csv.reader(["a", "b"]), next, "x.line_num"),
    "error feedback of PowerSGD": held(
        lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=9), lambda x: setattr(x, "iter", 1), "x.iter"),
    "distribution": held(
        lambda: torch.distributions.Normal(0.0, 1.0), lambda x: setattr(x, "loc", torch.ones(())), "x.loc"),
    "estimator of scikit-learn": held(fitted, lambda x: x.partial_fit([[1.0]]), "x.n_samples_seen_"),
    "decimal": held(lambda: [decimal.Decimal("0.1")], lambda x: x.append(x.pop() * 2), "x[0]"),
    "fraction": held(lambda: [fractions.Fraction(1, 3)], lambda x: x.append(x.pop() * 2), "x[0]"),
    "holder in a long list": held(lambda: [queue.Queue() for _ in range(20)], lambda x: x[18].put(1), "x"),
}  # fmt: skip


def script(own: dict[str, Any]) -> types.FrameType:
    """A function of a script that has these variables and no other ones."""
    lines = ["def script(own):", *(f"    {name} = own[{name!r}]" for name in own), "    del own", "    yield"]
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    running = scope["script"](own)
    next(running)
    KEPT.append(running)
    frame: types.FrameType = running.gi_frame
    return frame


KEPT: list[Any] = []


def read(own: dict[str, Any], state: dict[str, Any]) -> Read:
    roots, caches = Roots(script(own), state), CacheCounts()
    return plain_values(roots, look=caches.look) | caches.values(roots) | held_tensors(roots)[0]


def test_global_that_a_local_hides_is_read_and_so_is_a_private_one() -> None:
    scope: dict[str, Any] = {"sys": sys, "__name__": "train", "__private": 1, "count": 7, "model": (model := [0, 1])}
    exec("def loop(model, count=7):\n    return sys._getframe()", scope)
    frame = scope["loop"]("another")
    found = plain_values(Roots(frame, {"model": model}))
    names = ("model", "count", "train.model", "train.model[0]", "train.count", "__private")
    assert {name: found[name] for name in names if name in found} == {
        "model": "'another'", "count": "7", "train.count": "7", "__private": "1",
    }  # fmt: skip


def test_addresses_are_no_part_of_a_name_or_a_digest() -> None:
    def at(address: int) -> dict[str, Any]:
        addresses = [address + 16 * i for i in range(20)]
        return {
            "counts": dict.fromkeys(addresses, 1), "few": {addresses[0]: [1], "b": 2}, "seen": set(addresses),
            "shadow": {one: torch.ones(2) for one in addresses}, "hashed": {-(2**50) - address: 1},
        }  # fmt: skip

    here, there = read(at(2**46), {}), read(at(2**45), {})
    assert here == there
    assert here["few[id 0][0]"] == "1"
    assert read(at(2**46) | {"seen": {2**46}}, {}) != here


def test_object_of_a_library_that_cannot_be_read_is_named_and_harmless_ones_are_not() -> None:
    import pandas as pd  # type: ignore[import-untyped]  # noqa: PLC0415 - seconds

    opened = Path(__file__).open()  # noqa: SIM115  it ends with the test
    asked = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    board = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    own = {
        "asked": asked, "board": board,
        "room": threading.Semaphore(2), "other": threading.Semaphore(2), "mine": Local(), "line": queue.SimpleQueue(),
        "log": logging.getLogger("x"), "lock": threading.Lock(), "when": threading.Event(), "digits": re.compile("1"),
        "path": pathlib.Path(), "delay": queue.Queue(), "arguments": argparse.ArgumentParser(), "out": sys.stdout,
        "table": pd.DataFrame({"a": [1]}), "checksum": xxhash.xxh64(), "numbers": re.finditer("1", "11"),
        "pairs": itertools.pairwise([1, 2, 3]), "calls": iter(int, 1), "ended": iter([]), "made": (k for k in ()),
        "notes": tempfile.NamedTemporaryFile(),  # noqa: SIM115  it ends with the test
        "counts": HashStore(), "kind": torch.float32, "cpu": torch.device("cpu"),
        "dice": random.Random(1), "few": array.array("i", [1]), "annotations": annotations,
        "sums": np.broadcast([1], [2]), "sampled": iter(BatchSampler(range(9), 2, drop_last=True)),
        "price": decimal.Decimal("0.1"), "part": fractions.Fraction(1, 3), "folder": tempfile.TemporaryDirectory(),
        "spawn": multiprocessing.get_context("spawn"), "printer": pprint.PrettyPrinter(), "days": calendar.Calendar(),
        "keys": random.SystemRandom(), "lines": opened, "blocks": io.StringIO("1"), "at_once": Path(__file__).open(),  # noqa: SIM115  as above
    }  # fmt: skip
    next(opened)
    beyond, unread, roots = list[str](), NotRead(), Roots(script(own), {})
    plain_values(roots, beyond, unread.look)
    asked.communicate()
    board.communicate()
    assert beyond == []
    assert unread.names(roots) == [
        "asked (subprocess.Popen)",
        "room (threading.Semaphore)", "other (threading.Semaphore)", f"mine ({__name__}.Local)",
        "table (pandas.DataFrame)", "checksum (xxhash.xxh64)", "numbers (re.finditer)",
        "pairs (itertools.pairwise)", "notes (tempfile._TemporaryFileWrapper)",
        "counts (torch._C._distributed_c10d.HashStore)", "sums (numpy.broadcast)",
        "sampled (torch.utils.data.sampler.BatchSampler.__iter__)", "lines (_io.TextIOWrapper)",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_hidden_state_that_changes_shows_under_a_name(kind: str) -> None:
    own, state, change, name = ROWS[kind]()
    before, again = read(own, state), read(own, state)
    change()
    after = read(own, state)
    assert before == again, "to read a value does not change it"
    assert name in {key for key in before if key in after and before[key] != after[key]}, (before, after)


def test_dataset_has_the_name_of_its_variable_whatever_the_key_of_its_loader_is_bound_to() -> None:
    """A step that binds `data` anew says nothing of the loader, which a run tracks under this key."""
    dataset = Noisy()
    loader = ElasticLoader(dataset, global_batch=2, rank=0, world_size=1)
    values = read({"dataset": dataset, "data": torch.zeros(2)}, {"data": loader})
    assert "dataset.made" in values
    assert not [name for name in values if name.startswith(("data.", "run.loader"))]


BY_NAME = """
import sys


def weigh(opt):
    import phase_of_a_script as phase

    opt._seen = getattr(opt, "_seen", 0) + 1
    phase.batches += 1


def loop(opt):
    sys.path = sys.path
    weigh(opt)
    return look(sys._getframe())


before, after = loop(opt), loop(opt)
"""


def test_how_full_a_cache_is_does_not_count_where_the_function_computes_the_same_anew() -> None:
    scope: dict[str, Any] = {"math": math, "torch": torch, "HOLD": 3}
    exec("def weight(n): return 1.0 if n < HOLD else math.exp(-abs(n))\ndef mask(n): return torch.rand(n)", scope)
    own = {name: functools.lru_cache(maxsize=4)(scope[name]) for name in ("weight", "mask")}
    counted = {name for name in read(own, {}) if "cache_info" in name}
    assert counted == {"mask.cache_info().misses", "mask.cache_info().currsize"}


@pytest.mark.long
def test_what_the_text_names_is_read_on_an_optimizer_and_in_a_module_without_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1)
    monkeypatch.setitem(sys.modules, "phase_of_a_script", types.ModuleType("phase_of_a_script"))
    sys.modules["phase_of_a_script"].batches = 0  # type: ignore[attr-defined]
    scope: dict[str, Any] = {
        "opt": optimizer, "__name__": "train",
        "look": lambda frame: plain_values(
            Roots(frame, {"opt": optimizer}, far=elsewhere(frame, []), sets=lambda: set_on_objects(frame))
        ),
    }  # fmt: skip
    exec(BY_NAME, scope)
    before, after = scope["before"], scope["after"]
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == {
        "opt._seen": ("1", "2"), "phase_of_a_script.batches": ("1", "2"),
    }  # fmt: skip
    assert [name for name in after if name.startswith("opt.")] == ["opt._seen"], "the others are torch's"
    assert "sys.path" not in after


LOSSES = """
import os
import torch

_calls, RATE, _state, _open = 0, 0.5, {"stage": 0}, open
torch.nn.Linear.seen = torch.nn.functional.calls = torch.nn.functional.relu.calls = 0
torch.nn.functional.past = []


class Mixup:
    drawn = 0

    def draw(self):
        Mixup.drawn += 1


def weigh(rate=RATE):
    global _calls
    _calls += 1


def kept(history=[]):
    history.append(1)


def change():
    weigh()
    kept()
    Mixup().draw()
    _state["stage"] += 1
    os.environ["STAGE"] = str(int(os.environ.get("STAGE", 0)) + 1)
    os.environ["LEVEL"] = os.environ.get("LEVEL", "s") + "s"
    torch.nn.Linear.seen += 1
    torch.nn.functional.calls += 1
    torch.nn.functional.relu.calls += 1
    torch.nn.functional.past.append(0)
    torch.set_float32_matmul_precision("high" if _calls > 1 else "highest")
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the script's, of which the loop has one function. The modules of other tests would count as the
    script's too, and what is read has a bound."""
    for name, other in list(sys.modules.items()):
        path = getattr(other, "__file__", None)
        # One without a file is built in, and a second `_io` would be another module for the rest of the process.
        if path and script_objects.is_script(path):
            monkeypatch.delitem(sys.modules, name)
    (tmp_path / "losses_of_a_script.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("losses_of_a_script")
    yield module
    del sys.modules["losses_of_a_script"], torch.nn.Linear.seen, torch.nn.functional.calls  # type: ignore[attr-defined]
    del torch.nn.functional.past  # type: ignore[attr-defined]
    vars(torch.nn.functional.relu).clear()
    torch.set_float32_matmul_precision("highest")
    for name in ("STAGE", "LEVEL"):
        os.environ.pop(name, None)


def test_state_to_which_no_variable_leads_is_read(losses: Any) -> None:
    def read_all() -> Read:
        beyond = list[str]()
        frame = script({"change": losses.change})
        return plain_values(Roots(frame, far=elsewhere(frame, beyond)))

    losses.change()
    before, again = read_all(), read_all()
    losses.change()
    after = read_all()
    ours = ("losses_of_a_script.", "os.environ", "torch.")
    differing = {name: after[name] for name in before if name.startswith(ours) and before[name] != after[name]}
    assert {name: before[name] for name in before if name.startswith(ours)} == {
        name: again[name] for name in again if name.startswith(ours)
    }
    assert "s" * 3 not in differing.pop("os.environ['LEVEL']"), "it may be a secret"
    assert differing.pop("losses_of_a_script.kept.__defaults__[0]") == "2 elements"
    assert differing == {
        "losses_of_a_script._calls": "2", "losses_of_a_script.Mixup.drawn": "2",
        "losses_of_a_script._state['stage']": "2", "os.environ['STAGE']": "'2'",
        "torch.nn.modules.linear.Linear.seen": "2", "torch.nn.functional.calls": "2",
        "torch.nn.functional.relu.calls": "2", "torch.nn.functional.past": "2 elements",
        "torch.get_float32_matmul_precision()": "'high'",
    }  # fmt: skip
    assert not {"losses_of_a_script.RATE", "losses_of_a_script.weigh"} & before.keys(), "nothing changes them"


def test_globals_of_another_module_are_read_by_the_functions_that_name_them(losses: Any) -> None:
    """A job's comparison has no other way to them; a rehearsal reads all modules."""
    frame = script({"change": losses.change})
    losses.change()
    before, again = plain_values(frame), plain_values(frame)
    losses.change()
    after = plain_values(frame)
    assert before == again
    assert {name: after[name] for name in before if before[name] != after[name]} == {
        "losses_of_a_script._calls": "2", "losses_of_a_script.kept.__defaults__[0]": "2 elements",
        "losses_of_a_script._state['stage']": "2", "losses_of_a_script.Mixup.drawn": "2",
    }  # fmt: skip


def test_globals_of_another_module_are_read_by_the_methods_that_name_them(losses: Any) -> None:
    class Objective:
        __call__ = losses.change

    frame = script({"objective": Objective()})
    losses.change()
    before = plain_values(frame)
    losses.change()
    after = plain_values(frame)
    assert (before["losses_of_a_script._calls"], after["losses_of_a_script._calls"]) == ("1", "2")
