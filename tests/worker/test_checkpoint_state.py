"""A state comes back as it was, bit for bit and type for type, or is refused by name before it is saved."""

import math
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

import everstep
from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.save.shard import plan_shard
from everstep.checkpoint.save.snapshot import Staging
from everstep.checkpoint.state.tree import DTYPES, Flattener, unflatten
from everstep.storage import MemoryStore


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


def trained(seed: int) -> dict[str, Any]:
    """A state in the middle of training, of everything that usually is in one."""
    network = model(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    scaler = torch.amp.GradScaler("cpu")
    return {"model": network, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def save_and_restore(state: dict[str, Any], into: dict[str, Any]) -> int | None:
    store = MemoryStore()
    with everstep.Checkpointer(store=store) as first:
        first.restore(dict(state))
        first.save(7, state).wait(30)
    with everstep.Checkpointer(store=store) as second:
        return second.restore(into)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, bits of floats included."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return isinstance(b, float) and (a == b or (math.isnan(a) and math.isnan(b)))
    return type(a) is type(b) and a == b


def _bits(t: torch.Tensor) -> bytes:
    return bytes(t.detach().contiguous().flatten().view(torch.uint8).numpy()) if t.numel() else b""


def test_module_optimizer_scheduler_and_scaler_come_back_bit_identical() -> None:
    state, fresh = trained(1), trained(2)
    assert save_and_restore(state, fresh) == 7
    for key in state:
        assert same(dict(state[key].state_dict()), dict(fresh[key].state_dict())), key


def test_plain_values_come_back_with_their_types() -> None:
    value = {
        "epoch": 3, "name": "ü/~", "none": None, "flag": True, "nan": math.nan, "inf": -math.inf, "tuple": (1, (2.5,)),
        "keys": {1: "a", "1": "b", None: "c", (1, 2): "d", 1.5: "e"}, "$odd": {"$tensor": "not a reference"},
        "bytes": b"\x00\xff", "big": 2**200, "list": [[], {}, ()], "array": np.arange(5, dtype=np.int16),
        "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "half": torch.randn(3, dtype=torch.bfloat16),
    }  # fmt: skip
    into: dict[str, Any] = {"progress": {"stale": 1}, "step": 0, "history": [9]}
    inner = into["progress"]
    save_and_restore({"progress": value, "step": 12, "history": [1, 2]}, into)
    assert same(value, into["progress"])
    assert into["progress"] is inner, "mappings are refilled in place: the script holds references to them"
    assert (into["step"], into["history"]) == (12, [1, 2])


def test_every_dtype_comes_back_bit_identical() -> None:
    tensors = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 255, (3 * dtype.itemsize,), dtype=torch.uint8)
        tensors[str(dtype)] = raw.view(dtype)
    into = {"t": {}}  # type: ignore[var-annotated]
    save_and_restore({"t": tensors}, into)
    assert same(tensors, into["t"])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "$dict"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(values)
def test_any_tree_comes_back_equal(tree: object) -> None:
    flattener = Flattener()
    encoded = flattener.flatten(tree, "x")
    assert same(unflatten(encoded, flattener.tensors, "x"), tree)


def test_strided_and_expanded_tensors_are_saved_as_they_read() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"t": base.t(), "slice": base[1:3, ::2], "expanded": base[0].expand(3, 6)}
    into = {"s": {}}  # type: ignore[var-annotated]
    save_and_restore({"s": tensors}, into)
    assert all(torch.equal(into["s"][k], v) for k, v in tensors.items())


def test_tied_weights_are_stored_once_and_come_back_tied_in_value() -> None:
    flattener = Flattener()
    weight = torch.randn(4, 4)
    flattener.flatten({"a": weight, "b": weight}, "m")
    assert list(flattener.tensors) == ["m/a"]
    into = {"s": {}}  # type: ignore[var-annotated]
    save_and_restore({"s": {"a": weight, "b": weight}}, into)
    assert torch.equal(into["s"]["a"], weight)
    assert torch.equal(into["s"]["b"], weight)


def test_tensor_in_the_state_is_filled_in_place() -> None:
    target = torch.zeros(3)
    save_and_restore({"ema": torch.tensor([1.0, 2.0, 3.0])}, {"ema": target})
    assert target.tolist() == [1.0, 2.0, 3.0]


def test_what_a_mapping_or_list_holds_is_filled_in_place() -> None:
    center, counts, whole = torch.zeros(3), [0], torch.zeros(4)
    into: dict[str, Any] = {"state": {"center": center, "again": center, "counts": counts, "part": whole[:2]}}
    saved = {"center": torch.ones(3), "again": torch.full((3,), 2.0), "counts": [5], "part": torch.ones(2)}
    save_and_restore({"state": saved}, into)
    assert same(saved, into["state"])
    assert into["state"]["center"] is center
    assert into["state"]["counts"] is counts
    assert whole.tolist() == [1, 1, 0, 0], "a view is filled where it is, and nothing beside it"


def test_compiled_wrapper_is_seen_through_in_both_directions() -> None:
    plain = model(1)
    wrapped = torch.compile(model(2), backend="eager")
    save_and_restore({"model": plain}, {"model": wrapped})
    assert same(dict(plain.state_dict()), dict(wrapped._orig_mod.state_dict()))  # type: ignore[attr-defined]
    again = model(3)
    save_and_restore({"model": wrapped}, {"model": again})
    assert same(dict(plain.state_dict()), dict(again.state_dict()))


def test_random_generators_go_on_where_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    store = MemoryStore()
    with everstep.Checkpointer(store=store) as first:
        first.restore({"rng": everstep.RngState()})
        first.save(1, {"rng": everstep.RngState()}).wait(30)
    drawn = (random.random(), np.random.rand(), torch.rand(3).tolist())
    random.seed(2)
    torch.manual_seed(2)
    with everstep.Checkpointer(store=store) as second:
        second.restore({"rng": everstep.RngState()})
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn


class Evil:
    """Unpickling it fails the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [{"b": object()}]}, r"x/a/0/b.*builtins\.object"),
        ({"a": Evil()}, r"x/a.*Evil"),
        (torch.eye(3).to_sparse(), "x: .*not supported"),
        (torch.empty(3, device="meta"), "x: .*not supported"),
        ({frozenset(): 1}, "frozenset"),
        (np.array([object()]), "numpy"),
        ({"a": np.longdouble(1.5)}, r"x/a.*convert it to numpy\.float64"),
        (np.ones(2, np.clongdouble), r"x: .*convert it to numpy\.float64"),
    ],
)
def test_value_that_cannot_be_saved_is_refused_by_name_before_the_first_step(value: object, text: str) -> None:
    with pytest.raises(StateMismatch, match=text):
        everstep.Checkpointer(store=MemoryStore()).restore({"x": value})


def test_array_of_another_byte_order_keeps_its_values() -> None:
    store = MemoryStore()
    saved = {"x": np.array([1.5, -2.0], ">f4"), "n": np.array([2**40], ">i8")}
    checkpointer = everstep.Checkpointer(store=store)
    checkpointer.restore(saved)
    checkpointer.save(1, saved).wait(30)
    into = {"x": np.zeros(2, "f4"), "n": np.zeros(1, "i8")}
    assert everstep.Checkpointer(store=store).restore(into) == 1
    assert into["x"].tolist() == [1.5, -2.0]
    assert into["n"].tolist() == [2**40]


def test_recursive_state_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateMismatch, match="nested deeper"):
        everstep.Checkpointer(store=MemoryStore()).restore({"x": loop})


@pytest.mark.parametrize("key", ["", "@x", "$x", 3])
def test_state_key_that_cannot_be_a_name_is_refused(key: object) -> None:
    with pytest.raises(StateMismatch, match="state key"):
        everstep.Checkpointer(store=MemoryStore()).restore({key: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("into", "text"),
    [
        ({"model": model(1), "ema": 1}, "no 'ema'; it has model"),
        (
            {"model": torch.nn.Linear(2, 2)},
            "model/0.weight is in the commit and not in.*Nothing was changed",
        ),
        ({"model": 3}, "holds a module, the state passed in no module or dict"),
    ],
)
def test_commit_that_does_not_fit_is_an_error_that_names_the_key(into: dict[str, Any], text: str) -> None:
    with pytest.raises(StateMismatch, match=text):
        save_and_restore({"model": model(1)}, into)


class Late:
    """Something that commits of before it was tracked do not have."""

    everstep_optional = True
    value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Statistics:
    """An object of a script's, which counts on what its `state_dict` is made of."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {
            "seen": Counter[str](),
            "by": defaultdict[str, list[int]](list),
            "order": OrderedDict[str, int](),
        }

    def see(self, word: str) -> None:
        self.kept["seen"][word] += 1
        self.kept["by"][word].append(len(word))
        self.kept["order"][word] = 1
        self.kept["order"].move_to_end(word, last=False)

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def test_object_that_loads_is_given_mappings_of_the_classes_that_it_has() -> None:
    saved, into = Statistics(), Statistics()
    saved.see("one")
    save_and_restore({"words": saved}, {"words": into})
    for words in (saved, into):
        words.see("two")
    assert into.kept == saved.kept
    assert [type(value) for value in into.kept.values()] == [Counter, defaultdict, OrderedDict]


def test_steps_of_a_schedule_are_counted_as_before_behind_its_milestones() -> None:
    """`SequentialLR` asks a `MultiStepLR` for its closed form, which needs the `Counter`."""

    def made() -> tuple[torch.optim.Optimizer, SequentialLR]:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
        return optimizer, SequentialLR(optimizer, [LinearLR(optimizer, 0.1), MultiStepLR(optimizer, [1, 2])], [5])

    (first, one), (second, other) = made(), made()
    for _ in range(3):
        first.step(), one.step()
    save_and_restore({"optimizer": first, "schedule": one}, {"optimizer": second, "schedule": other})
    for _ in range(6):
        first.step(), one.step(), second.step(), other.step()
        assert one.get_last_lr() == other.get_last_lr()


def test_optional_object_that_the_commit_lacks_stays_as_it_is_and_else_is_restored() -> None:
    late, other = Late(), Late()
    other.value = 2
    save_and_restore({"model": model(1)}, {"model": model(2), "late": late})
    assert late.value == 1
    save_and_restore({"model": model(1), "late": other}, {"model": model(2), "late": late})
    assert late.value == 2


def test_pickle_in_the_place_of_a_shard_is_damage_and_is_never_loaded() -> None:
    store = MemoryStore()
    with everstep.Checkpointer(store=store) as first:
        first.restore({})
        first.save(1, {"model": model(1)}).wait(30)
    for name in [n for n in store.objects if n.startswith("data/")]:
        store.objects[name] = pickle.dumps(Evil())
    with pytest.raises(everstep.checkpoint.CheckpointError, match="none of the 1 commits"):
        everstep.Checkpointer(store=store).restore({"model": model(2)})


def test_shard_opens_with_the_safetensors_library() -> None:
    tensors = {"a/w": torch.randn(3, 5), "b": torch.tensor([True, False, True]), "c": torch.randn(7).to(torch.bfloat16),
               "d": torch.empty(0), "e": torch.tensor(3, dtype=torch.int64)}  # fmt: skip
    data = Staging().fill(plan_shard(tensors), tensors)
    loaded = safetensors.torch.load(bytes(data))
    assert same(dict(sorted(loaded.items())), tensors)
