"""What people did in good faith, and lost a checkpoint by (issue 16): each is refused by name, or kept.

Scripts that end run in processes of their own: what is tried is the end of an interpreter.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import everstep
from everstep.checkpoint import StateMismatch
from everstep.checkpoint.errors import FormatError, SaveFailed
from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Head
from everstep.checkpoint.state.alike import digests
from everstep.checkpoint.state.capture import capture
from everstep.storage import MemoryStore, open_store


def kept(store: Any, like: dict[str, Any]) -> int | None:
    checkpointer = everstep.Checkpointer(store=store)
    try:
        return checkpointer.restore(like)
    finally:
        checkpointer.close()


# --- what nobody could read is not written


@pytest.mark.parametrize("step", [7.5, -3, 2**62 + 1, True, "9", None, float("nan"), np.float32(3), torch.ones(2)])
def test_step_that_no_record_holds_is_refused_before_anything_is_written(step: Any, runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, keep=1)
    run, _ = runs(store).begin(keep=1, every_steps=1)
    before = dict(store.objects)
    for call in (lambda: run.save(step, runs.state(2)), lambda: run.should_save(step)):
        with pytest.raises(ValueError, match=r"step=.*an integer from 0 to 2\*\*62"):
            call()
    assert store.objects == before
    run.save(2, runs.state(2)).wait(30)
    run.close()
    assert runs(store).restored() == 2


@pytest.mark.parametrize("step", [np.int64(9), torch.tensor(9), np.uint8(9)])
def test_integers_of_other_libraries_are_steps(step: Any, runs: Any) -> None:
    store = MemoryStore()
    run, _ = runs(store).begin()
    outcome: Any = run.save(step, runs.state(9)).wait(30)
    assert type(outcome.step) is int
    run.close()
    assert runs(store).restored() == 9


@pytest.mark.parametrize("length", [3_000, 5_000])
def test_path_is_short_enough_to_be_read_or_refused(length: int) -> None:
    store = MemoryStore()
    state = {"n": {"k" * length: torch.ones(2)}}
    with everstep.Checkpointer(store=store, keep=1) as run:
        if length > 4_000:
            with pytest.raises(StateMismatch, match=r"n/k+….*at most 4000"):
                run.restore(state)
            return
        run.restore(state)
        run.save(1, state).wait(30)
    assert kept(store, {"n": {"k" * length: torch.zeros(2)}}) == 1


def test_record_that_could_not_be_read_is_not_created() -> None:
    store = MemoryStore()
    own = OpenRecord(0, "w", 0, "", 1, "2026-11-24T00:00:00Z", (), NONE, NONE)
    log = CommitLog(store)
    log._create(Head(), own)
    draft = CommitRecord(NONE, "w", 0, "", -1, "s", 1, "2026-11-24T00:00:00Z", 0, NONE, (), (), {})
    with pytest.raises(FormatError, match="step is '-1'"):
        log.commit(Head(0, own, NONE), own, draft)
    assert [n for n in store.objects if n.startswith("log/")] == ["log/000000000000.json"]


class Wrapper(torch.Tensor):
    """Has no memory, and no way to tell of what it is made."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, shape)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (freed, "memory was freed"),
        (lambda: TwoTensor(torch.ones(2), torch.zeros(2)), "TwoTensor computes its elements"),
        (lambda: Wrapper((3,)), "Wrapper computes its elements"),
    ],
    ids=["freed", "of two tensors", "wrapper"],
)
def test_tensor_without_memory_of_its_own_is_refused_by_name(made: Callable[[], Any], words: str) -> None:
    store = MemoryStore()
    with everstep.Checkpointer(store=store) as run:
        run.restore({"a": torch.ones(3)})
        with pytest.raises(StateMismatch, match=f"^a/b: .*{words}"):
            run.save(1, {"a": {"b": made()}})
    assert kept(store, {"a": torch.ones(3)}) is None


def test_conjugate_and_negative_views_are_no_ties() -> None:
    store = MemoryStore()
    z = torch.randn(4, dtype=torch.complex64)
    state = {"z": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag, "tie": z}
    with everstep.Checkpointer(store=store) as run:
        run.restore(state)
        run.save(1, state).wait(30)
    into = {name: torch.zeros_like(tensor.resolve_conj().resolve_neg()) for name, tensor in state.items()}
    assert kept(store, into) == 1
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor.resolve_conj().resolve_neg()), name


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"o": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict()}, "Give the optimizer itself"),
        (torch.nn.Linear(1, 1), "a state is a dict, not a Linear"),
        ({"m": torch.nn.LazyLinear(1)}, "m/weight: a lazy module's parameter"),
    ],
    ids=["optimizer", "module", "lazy"],
)
def test_what_would_be_restored_into_nothing_is_refused(state: Any, words: str) -> None:
    with pytest.raises(StateMismatch, match=words):
        everstep.Checkpointer(store=MemoryStore()).restore(state)


class Average:
    """An average that keeps its module to itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> Any:
        return self.module.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.module.load_state_dict(state)


def test_ranks_may_hold_other_buffers_and_mappings_in_another_order() -> None:
    def told(rank: int) -> dict[str, int]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        module[1].running_mean.fill_(float(rank))
        numbers = {1: 1, 3: 1} if rank else {3: 1, 1: 1}
        state = {"m": module, "average": Average(module), "dict": module.state_dict(), "numbers": numbers,
                 "nested": {"of": [module.state_dict()]}, "t": torch.ones(3)}  # fmt: skip
        return digests(state, capture(state, rank))

    assert told(0) == told(1)
    other = {"t": torch.zeros(3)}
    assert digests(other, capture(other, 0))["t"] != told(0)["t"]


# --- memory that cannot be written to as such


def test_tensor_that_shows_one_number_at_many_places_is_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    with pytest.raises(StateMismatch, match=r"scale: several of its elements share one place.*\.clone\(\)"):
        everstep.Checkpointer(store=store).restore({"scale": torch.ones(1).expand(5)})
    assert not [name for name in store.objects if name.startswith("data/")]


def test_tensors_that_were_made_in_inference_mode_come_back() -> None:
    def state(value: float) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        with torch.inference_mode():
            model.register_buffer("mask", torch.full((3,), value))
            model.register_buffer("turned", torch.full((3, 2), value).T)
            return {"m": model, "top": torch.full((4,), value), "in": {"side": torch.full((4,), value)}}

    store = MemoryStore()
    saved, loaded, read = state(1.0), state(2.0), state(3.0)
    with everstep.Checkpointer(store=store) as run:
        run.restore(saved)
        run.save(1, saved).wait(30)
    assert kept(store, loaded) == 1
    everstep.load(store=store, state=read)
    for found in (loaded, read):
        assert torch.equal(found["m"].weight, saved["m"].weight)
        values = [found["m"].mask, found["m"].turned, found["top"], found["in"]["side"]]
        assert {v for tensor in values for v in tensor.flatten().tolist()} == {1.0}


# --- what cannot be read makes no room for what can


def test_commit_whose_shard_the_store_lost_does_not_count_as_kept(runs: Any) -> None:
    class Forgetful(MemoryStore):
        def list(self, folder: str = "") -> Any:
            return [info for info in super().list(folder) if not self.hides(info.name)]

        def size(self, name: str) -> int | None:
            return None if self.hides(name) else super().size(name)

        def hides(self, name: str) -> bool:
            return name.startswith("data/") and name.endswith(".safetensors") and "00000002/" in name

    store = Forgetful()
    run, _ = runs(store).begin(keep=1)
    for step in (1, 2):
        run.save(step, runs.state(step)).wait(30)
        runs.settle(run)
    assert sorted(name.split("-")[-1] for name in store.objects if name.startswith("data/")) == [
        "00000001/00000.safetensors", "00000002/00000.safetensors"
    ]  # fmt: skip
    run.save(3, runs.state(3)).wait(30)
    runs.settle(run)
    run.close()
    assert runs(store).restored() == 3
    left = [info.name.split("-")[-1] for info in store.list("data/")]
    assert left == ["00000003/00000.safetensors"], "the newest is whole, so the oldest goes"


def test_record_that_cannot_be_read_back_costs_nothing_that_was_kept(runs: Any, caplog: Any) -> None:
    class Cuts(MemoryStore):
        cut = ""

        def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
            return super().get(name, start, end)[: 40 if name == self.cut else None]

    store = Cuts()
    run, _ = runs(store).begin(keep=1)
    run.save(1, runs.state(1)).wait(30)
    runs.settle(run)
    store.cut = "log/000000000002.json"
    run.save(2, runs.state(2)).wait(30)
    runs.settle(run)
    run.close()
    assert "was just written, and cannot be read" in caplog.text
    assert runs(store).restored() == 1


# --- the last save


class Gate(MemoryStore):
    """Takes a commit once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def create(self, name: str, data: Any) -> None:
        if name.startswith("log/") and name != "log/000000000000.json":
            assert self.gate.wait(30)
        super().create(name, data)


def test_save_that_comes_while_one_is_in_flight_waits_for_it_with_its_own_copy(runs: Any, events: Any) -> None:
    store = Gate()
    run, _ = runs(store).begin(on_event=events)
    live = runs.state(98)
    first = run.save(98, live)
    live["w"].fill_(99.0)
    second = run.save(99, {**live, "step": 99})
    live["w"].fill_(-1.0)
    assert not first.done()
    assert not second.done()
    store.gate.set()
    run.close()
    assert [fields["step"] for fields in events.of("committed")] == [98, 99]
    assert runs(store).restored() == 99


def test_saves_faster_than_the_store_are_all_committed_in_their_order(runs: Any, events: Any) -> None:
    class Slow(MemoryStore):
        def create(self, name: str, data: Any) -> None:
            time.sleep(0.01)
            super().create(name, data)

        def list(self, folder: str = "") -> Any:
            time.sleep(0.01)
            return super().list(folder)

    store = Slow()
    run, _ = runs(store).begin(keep=100, on_event=events)
    for step in range(1, 60):
        run.save(step, runs.state(step))
        time.sleep(0.001 * (step % 7))
    run.close()
    assert [fields["step"] for fields in events.of("committed")] == list(range(1, 60))
    assert runs(store).restored() == 59


def test_threads_that_save_at_once_save_one_after_the_other(runs: Any) -> None:
    store = MemoryStore()
    run, _ = runs(store).begin(keep=100)

    def save(first: int) -> None:
        for number in range(first, 30, 3):  # of one step: who comes first is chance, and steps may not go backwards
            run.save(7, {**runs.state(7), "w": torch.full((300,), float(number)), "number": number})

    threads = [threading.Thread(target=save, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.close()
    found = everstep.Checkpointer(store=store).list()
    states = [everstep.load(store=store, n=one.n).state for one in found]
    assert sorted(state["number"] for state in states) == list(range(30))
    assert all(set(state["w"].tolist()) == {float(state["number"])} for state in states)


@pytest.mark.parametrize("size", [300, 3_000_000])
def test_state_that_is_trained_while_another_thread_saves_it_is_not_committed(size: int, runs: Any) -> None:
    store = MemoryStore()
    run, _ = runs(store).begin()
    state = {**runs.state(7), "w": torch.zeros(size)}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run.save, 7, state).result().wait(60)  # the loop waits meanwhile
        late = pool.submit(run.save, 8, state)
        while not late.done():
            state["w"].add_(1)
    with pytest.raises(everstep.checkpoint.SaveFailed, match="step 8 was not saved: w changed while it was copied"):
        late.result().wait(60)
    run.save(9, state)
    run.close()
    assert [commit.step for commit in everstep.Checkpointer(store=store).list()] == [9, 7]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_save_that_is_interrupted_while_it_copies_costs_no_other(error: type[BaseException], runs: Any) -> None:
    store = Gate()
    run, _ = runs(store).begin()
    run.save(98, runs.state(98))
    run.save(99, runs.state(99))
    store.gate.set()
    run.wait(30)
    buffers = run._snapshots.buffers
    for staging in [*buffers._free, *(staging for _, staging in buffers._read)]:
        staging.fill = lambda *_: (_ for _ in ()).throw(error)
    with pytest.raises(error):
        run.save(100, runs.state(100))
    assert run.wait(1)
    run.close()
    assert runs(store).restored() == 99


def test_hook_that_ends_the_script_ends_no_save(runs: Any) -> None:
    def hook(kind: str, **_: Any) -> None:
        if kind in ("committed", "save-failed"):
            sys.exit(84)

    class Fails(MemoryStore):
        fails = False

        def create(self, name: str, data: Any) -> None:
            if self.fails:
                raise BaseException("of a foreign library")
            super().create(name, data)

    store = Fails()
    run, _ = runs(store).begin(on_event=hook)
    run.save(1, runs.state(1)).wait(30)
    store.fails = True
    with pytest.raises(SaveFailed, match="of a foreign library"):
        run.save(2, runs.state(2)).wait(30)
    store.fails = False
    run.save(3, runs.state(3)).wait(30)
    run.close()
    assert runs(store).restored() == 3


def test_state_that_is_refused_leaves_the_saves_before_it(runs: Any) -> None:
    store = Gate()
    run, _ = runs(store).begin()
    run.save(98, runs.state(98))
    run.save(99, runs.state(99))
    with pytest.raises(StateMismatch):
        run.save(100, {"w": object()})
    store.gate.set()
    run.close()
    assert runs(store).restored() == 99


def test_run_whose_saves_are_slow_proves_all_the_same_that_its_state_is_no_poison(runs: Any) -> None:
    store = Gate()
    store.gate.set()
    runs(store).save(1)
    run, _ = runs(store).begin(every_steps=1000)
    store.gate.clear()
    run.save(2, runs.state(2))
    run.save(3, runs.state(3))
    for step in range(4, 30):
        run.should_save(step)
    store.gate.set()
    run.close()
    assert [name for name in store.objects if name.startswith("loads/")] == []


def test_listing_that_is_stale_deletes_nothing(runs: Any) -> None:
    class Stale(MemoryStore):
        hidden = ""

        def list(self, folder: str = "") -> Any:
            return [i for i in super().list(folder) if not self.hidden or self.hidden not in i.name]

    store = Stale()
    run, _ = runs(store).begin(keep=2)
    for step in (1, 2, 3):
        store.hidden = "00000002/" if step == 3 else ""
        run.save(step, runs.state(step)).wait(30)
        runs.settle(run)
    store.hidden = ""
    assert [f.step for f in run.list()] == [3, 2]
    run.close()


def test_close_tells_what_the_last_save_came_to(runs: Any) -> None:
    class Full(MemoryStore):
        full = False

        def create(self, name: str, data: bytes) -> None:
            if self.full:
                raise PermissionError("no space")
            super().create(name, data)

    store = Full()
    run, _ = runs(store).begin()
    run.save(1, runs.state(1)).wait(30)
    store.full = True
    run.save(2, runs.state(2))
    with pytest.raises(SaveFailed, match="step 2: no space"):
        run.close()
    run.close()  # told once

    store.full = False
    run, _ = runs(store).begin()
    store.full = True
    with pytest.raises(SaveFailed):
        run.save(3, runs.state(3)).wait(30)
    run.close()  # the script has heard it


SCRIPT = """
import atexit, os, signal, sys, threading, time
import torch, everstep
from everstep.storage.backends.local import LocalStore

create = LocalStore.create
def late(self, name, data):
    if name.startswith("log/") and name != "log/000000000000.json":
        time.sleep(0.5)
        {store}
    create(self, name, data)
LocalStore.create = late

def main():
    run = everstep.Checkpointer(sys.argv[1], peer_timeout=120)
    state = {{"w": torch.full((10,), 99.0)}}
    run.restore(state)
    atexit.register(print, "handlers ran")
    run.save(99, state)
    state["w"].fill_(100.0)
    {end}

{start}
"""
LAST = "run.save(100, state)"
ENDS = {
    "nothing": (LAST, 0),
    "exit": (f"{LAST}; sys.exit(0)", 0),
    "exit code": (f"{LAST}; sys.exit(3)", 3),
    "left": ("""
    with run:
        run.save(100, state)
        sys.exit(0)""", 0),
    "an error before": (f"""
    import code
    code.InteractiveInterpreter().runsource("1/0")
    {LAST}""", 0),
    "a thread": (f"""
    def train():
        time.sleep(1)
        {LAST}
    threading.Thread(target=train).start()""", 0),
    "a handler": (f"""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    {LAST}
    os.kill(os.getpid(), signal.SIGTERM)""", 0),
    "a child": (f"""
    {LAST}
    with run:
        if os.fork() == 0:
            sys.exit(0)
        os.wait()""", 0),
    "tried again": (f"""
    try:
        with run:
            raise ValueError
    except ValueError:
        pass
    with everstep.Checkpointer(sys.argv[1]) as run:
        run.restore(state)
        state["w"].fill_(100.0)
        {LAST}""", 0),
}  # fmt: skip


def play(url: Path, end: str, store: str = "pass", start: str = "main()") -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(end=end, store=store, start=start)
    return subprocess.run(
        [sys.executable, "-c", script, str(url)], check=False, capture_output=True, text=True, timeout=60
    )


@pytest.mark.long_but("exit code")
@pytest.mark.parametrize("name", ENDS)
def test_script_that_ends_in_order_keeps_its_last_save(name: str, tmp_path: Path) -> None:
    end, code = ENDS[name]
    done = play(tmp_path, end)
    assert done.returncode == code, done.stderr
    assert "handlers ran" in done.stdout
    into = {"w": torch.zeros(10)}
    assert kept(open_store(str(tmp_path)), into) == 100
    assert set(into["w"].tolist()) == {100.0}


@pytest.mark.long
def test_handler_that_ends_the_script_in_close_leaves_the_last_save_to_its_end(tmp_path: Path) -> None:
    end = f"""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    {LAST}
    closing.set()
    run.close()
    print("went on")"""
    store = "closing.wait(30) and told.append(1); len(told) == 1 and os.kill(os.getpid(), signal.SIGTERM)"
    done = play(tmp_path, end, store, start="closing, told = threading.Event(), []; main()")
    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "handlers ran"), done.stderr
    assert kept(open_store(str(tmp_path)), {"w": torch.zeros(10)}) == 100


@pytest.mark.long
def test_close_that_was_interrupted_and_is_called_again_goes_on(tmp_path: Path) -> None:
    end = f"""
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, interrupt)
    {LAST}
    try:
        closing.set()
        run.close()
    except KeyboardInterrupt:
        run.close()
        os._exit(5)"""
    store = "closing.wait(30) and told.append(1); len(told) == 1 and os.kill(os.getpid(), signal.SIGTERM)"
    done = play(tmp_path, end, store, start="closing, told = threading.Event(), []; main()")
    assert done.returncode == 5, done.stderr
    assert kept(open_store(str(tmp_path)), {"w": torch.zeros(10)}) == 100


@pytest.mark.long
def test_save_in_a_function_of_atexit_is_refused_with_an_exit_code(tmp_path: Path) -> None:
    done = play(tmp_path, "atexit.register(lambda: run.save(100, state))")
    assert done.returncode == 1, done.stderr
    assert "the script has ended, and its last save is finished before the functions of atexit run" in done.stderr
    assert kept(open_store(str(tmp_path)), {"w": torch.zeros(10)}) == 99


@pytest.mark.long
@pytest.mark.parametrize("call", ["run.save(100, state)", "run.should_save(100)", "run.restore(state)"])
def test_forked_child_cannot_use_its_parents_checkpointer(call: str, tmp_path: Path) -> None:
    end = f"""
    if os.fork() == 0:
        run.wait()
        {call}
        os._exit(9)
    print("child", os.waitstatus_to_exitcode(os.wait()[1]))"""
    done = play(tmp_path, end)
    assert (done.returncode, "child 1" in done.stdout.split("\n")) == (0, True), done.stderr
    assert "this process was forked from the one that the Checkpointer belongs to" in done.stderr


@pytest.mark.long
def test_script_that_ends_by_an_error_waits_for_no_save(tmp_path: Path) -> None:
    done = play(tmp_path, f"{LAST}; raise ValueError('a mistake')", store="time.sleep(50)")
    assert done.returncode == 1
    assert "a mistake" in done.stderr


@pytest.mark.long
def test_script_whose_last_save_comes_to_nothing_ends_with_an_error(tmp_path: Path) -> None:
    done = play(tmp_path, LAST, store="raise PermissionError('no space')")
    assert done.returncode == 1, done.stderr
    assert "its last save failed" in done.stderr
    assert "step 100: no space" in done.stderr
    assert "handlers ran" in done.stdout


@pytest.mark.long
def test_older_checkpointer_that_a_newer_one_has_fenced_says_so_at_the_end_of_the_script(tmp_path: Path) -> None:
    end = """
    while run.latest() is None:  # or the save before would be fenced, and the next one raises that
        time.sleep(0.01)
    newer = everstep.Checkpointer(sys.argv[1])
    newer.restore(state)
    run.save(100, state)
    newer.save(101, state)"""
    done = play(tmp_path, end)
    assert done.returncode == 0, done.stderr
    assert "an older Checkpointer of this process" in done.stderr
    assert kept(open_store(str(tmp_path)), {"w": torch.zeros(10)}) == 101


@pytest.mark.long
def test_child_of_multiprocessing_that_fails_waits_for_no_save(tmp_path: Path) -> None:
    start = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=main)
child.start()
child.join()
print("child", child.exitcode)
"""
    done = play(tmp_path, "raise ValueError('a mistake')", store="time.sleep(50)", start=start)
    assert "child 1" in done.stdout, done.stderr


EVALUATES = """
import sys, torch, everstep
state = {"w": torch.zeros(300), "step": 0}
print(everstep.Checkpointer(sys.argv[1]).restore(state), state["step"])
"""


@pytest.mark.long
def test_scripts_that_only_restore_cast_no_suspicion(runs: Any, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    runs(store).save(5, 9)
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", EVALUATES, str(tmp_path)], check=False, capture_output=True, text=True, timeout=90
        )
        assert (done.returncode, done.stdout.split()) == (0, ["9", "9"]), done.stderr
    assert [info.name for info in store.list("loads/")] == []
