"""Records of another hand: whoever reads a commit gets the right values, or a refusal of a documented type, soon.

Each record here has a checksum that is right, as one has that somebody made on purpose. Memory is bounded by the
kernel: what a record claims must not be allocated.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import typer
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import everstep
from everstep.checkpoint import CheckpointError
from everstep.checkpoint.errors import FormatError, StateMismatch
from everstep.checkpoint.format.boxes import check_tiling
from everstep.checkpoint.format.layout import record_name
from everstep.checkpoint.format.manifest import Piece
from everstep.checkpoint.retention.catalog import Catalog
from everstep.cli.ckpt import app as cli
from everstep.storage import MemoryStore, StorageError, open_store

SECONDS = 20.0  # of the processor, for all readings of one record; what is refused takes milliseconds
MEMORY = 2**31  # bytes beyond what the process has mapped already
NEWEST = 2  # the record that is replaced
Json = Any


def sealed(line: bytes) -> bytes:
    return line + b'\n{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(line).encode() + b'"}\n'


def dumped(body: Json) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def state(value: float) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return {
        "model": model, "optimizer": optimizer, "rng": everstep.RngState(), "epoch": value,
        "mixed": {"t": (1, 2.5), 3: [torch.full((2, 2), value), math.nan], "b": b"bytes"},
    }  # fmt: skip


@functools.cache
def pristine() -> tuple[dict[str, bytes], Json]:
    """A store with commits of steps 1 and 2, and the body of the newest record."""
    store = MemoryStore()
    with everstep.Checkpointer(store=store, on_event=lambda kind, **_: None) as run:
        run.restore(state(0.0))
        for step in (1, 2):
            run.save(step, state(float(step))).wait(30)
    return dict(store.objects), json.loads(store.objects[record_name(NEWEST)].partition(b"\n")[0])


def store_with(record: bytes) -> MemoryStore:
    store = MemoryStore()
    store.objects.update(pristine()[0])
    store.objects[record_name(NEWEST)] = record
    return store


@contextmanager
def bounded() -> Iterator[None]:
    """Within it memory is scarce, and the time that it took is checked."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - began < SECONDS


REFUSALS = (CheckpointError, StorageError)


def restored(store: MemoryStore) -> float | None:
    """The value of which all of the state is; None: refused."""
    into = state(0.0)
    with everstep.Checkpointer(store=store, on_event=lambda kind, **_: None) as run:
        try:
            step = run.restore(into)
        except REFUSALS:
            return None
    assert step is not None
    return values_in(into)


def values_in(found: Mapping[str, Any]) -> float:
    model: Any = found["model"]
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else [model["0.weight"], model["0.bias"]]
    seen = {float(x) for p in parameters for x in p.detach().flatten()}
    assert len(seen) == 1, seen
    return seen.pop()


def loaded(store: MemoryStore) -> float | None:
    try:
        return values_in(everstep.load(store=store).state)
    except REFUSALS:
        return None


def looked_at(store: MemoryStore, tmp_path: Path) -> None:
    """The command line, with no error that is not a line and an exit code."""
    folder = open_store(str(tmp_path / "store"))
    for name, data in store.objects.items():
        folder.put(name, data)
    commands = [("ls",), ("ls", "--json"), ("show", "--tensors"), ("verify", "--all"), ("verify", "--record", "2"),
                ("export", tmp_path / "out", "--record", "2"), ("cat", "epoch", "--record", "2")]  # fmt: skip
    for name, *rest in commands:
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = 0
            try:
                cli((str(name), str(tmp_path / "store"), *map(str, rest)), standalone_mode=False)
            except typer.Exit as e:
                code = e.exit_code
        assert code in (0, 1, 2, 3)


def attack(record: bytes, tmp_path: Path | None = None, *, steps_over: bool = False) -> None:
    """Whatever the record is: the values are those of a commit, or there is a refusal."""
    with bounded():
        for read in (restored, loaded):
            found = read(store_with(record))
            assert found in ((1.0,) if steps_over else (1.0, 2.0, None)), f"{read.__name__}: {found}"
        with suppress(*REFUSALS):
            assert isinstance(Catalog(store_with(record)).verify(), tuple)
        if tmp_path is not None:
            looked_at(store_with(record), tmp_path)


def changed(change: Callable[[Json], object]) -> bytes:
    body = copy.deepcopy(pristine()[1])
    change(body)
    return sealed(dumped(body))


# -- what is known to have gone wrong


def first_entry(body: Json) -> Json:
    return body["entries"]["model/0.weight"]


def many_axes(body: Json) -> None:
    """A tiling of 2^10 boxes of which few begin at different places, on any axis: each was compared with each."""
    axes = 10
    pieces = [
        {"shard": 0, "key": "k", "offset": [i >> a & 1 for a in range(axes)], "shape": [1] * axes, "begin": 4 * i,
         "end": 4 * i + 4}
        for i in range(2**axes)
    ]  # fmt: skip
    body["shards"][0] |= {"bytes": 4 * 2**axes, "chunk_bytes": 2**62}
    body["entries"]["model/0.weight"] = {"dtype": "F32", "shape": [2] * axes, "pieces": pieces}


def many_pieces(body: Json) -> None:
    """A tiling of a plane that no axis takes apart: 900 elements, each a piece, which overlap nowhere."""
    side = 30
    pieces = [
        {"shard": 0, "key": "k", "offset": [i, j], "shape": [1, 1], "begin": 4 * (i * side + j),
         "end": 4 * (i * side + j) + 4}
        for i in range(side) for j in range(side)
    ]  # fmt: skip
    body["shards"][0] |= {"bytes": 4 * side * side, "chunk_bytes": 2**62}
    body["entries"]["model/0.weight"] = {"dtype": "F32", "shape": [side, side], "pieces": pieces}


def three_tebibytes(body: Json) -> None:
    size = 3 * 2**40
    body["shards"][0] |= {"bytes": size, "chunk_bytes": 2**62, "xxh3_128": ["0" * 32]}
    body["entries"] = {"model/0.weight": {"dtype": "U8", "shape": [size], "pieces": [
        {"shard": 0, "key": "k", "offset": [0], "shape": [size], "begin": 0, "end": size}]}}  # fmt: skip
    body["values"] = {"state": {"model": {"kind": "value", "tree": {"$tensor": "model/0.weight"}}}}


def shared_bytes(body: Json) -> None:
    entry = first_entry(body)
    body["entries"] |= {f"x{i}": copy.deepcopy(entry) for i in range(300)}


def shared_path(body: Json) -> None:
    body["shards"].append(copy.deepcopy(body["shards"][0]))


def nothing_of_much(body: Json) -> None:
    body["entries"]["model/0.weight"] = {"dtype": "F32", "shape": [2**62, 2**62, 0], "pieces": []}


def deep(body: Json) -> None:
    tree: Json = 1
    for _ in range(300):
        tree = [tree]
    body["values"]["state"]["epoch"]["tree"] = tree


KNOWN: list[Callable[[Json], object]] = [
    many_axes, many_pieces, shared_bytes, shared_path, nothing_of_much,
    lambda b: b.update(values=[]), lambda b: b.update(values=None), lambda b: b["values"].update(state=[]),
    lambda b: b["values"].update(state={"model": 1}), lambda b: b["values"]["state"]["model"].pop("tree"),
    lambda b: b["values"]["state"]["model"].update(tree=[]), lambda b: b["values"]["state"]["model"].update(kind=1),
    lambda b: b["values"]["state"]["epoch"].update(tree={"$tensor": "nowhere"}),
    lambda b: b["values"]["state"]["epoch"].update(tree={"$dict": [[[], 1]]}),
    lambda b: b["values"]["state"]["epoch"].update(tree={"$bytes": "\x00"}),
    lambda b: b["values"].update(ranks=1), lambda b: b["values"].update(ranks=[1]),
    lambda b: b["values"].update(metrics={"loss": "low"}), lambda b: b["values"].update(nonfinite=1),
    lambda b: b["values"].update(metrics={"loss": 10**400}),
    lambda b: b.update(entries=[]), lambda b: first_entry(b).update(shape=[2] * 65),
    lambda b: first_entry(b)["pieces"][0].update(shape=[-1, 3]), lambda b: first_entry(b).update(dtype="F4"),
    lambda b: b["shards"][0].update(path="data/../log/000000000000.json"), lambda b: b.update(step=10**400),
]  # fmt: skip


@pytest.mark.long_but("<lambda>0")
@pytest.mark.parametrize("change", KNOWN, ids=lambda c: getattr(c, "__name__", "x"))
def test_known_attack_is_stepped_over_in_time_and_memory(change: Callable[[Json], object], tmp_path: Path) -> None:
    attack(changed(change), tmp_path, steps_over=True)


@pytest.mark.long_but("b'[[],[],[],[]'")
@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"]" * 100_000, b"[" + b"[]," * (20 * 2**20) + b"[]]", b'{"n":NaN}', b'{"n":1e400}', b"",
        b"\xff\xfe", b'{"version":1,"n":2,"kind":"commit"}', b"{" * 10**6, b"9" * 5000,
    ],
    ids=lambda line: str(line[:12]),
)  # fmt: skip
def test_line_that_is_no_record_is_stepped_over(line: bytes) -> None:
    attack(sealed(line), steps_over=True)


def generators(body: Json) -> Json:
    return body["values"]["ranks"][0]["rng"]["tree"]


@pytest.mark.parametrize(
    "change",
    [
        lambda b: generators(b).update(numpy={"$tuple": ["MT19937", "", 624, 0, 0.0]}),
        lambda b: generators(b).update(numpy=["MT19937"]),
        lambda b: generators(b).update(python={"version": 3, "words": [10**400], "gauss": None}),
        lambda b: generators(b)["python"].update(version=10**400),
        lambda b: generators(b).update(torch=5),
    ],
)
def test_values_that_an_object_cannot_load_are_refused_by_the_name_of_the_object(change: Any) -> None:
    store, told = store_with(changed(change)), "rng: the commit does not fit the object passed in"
    with (
        everstep.Checkpointer(store=store, on_event=lambda *_, **__: None) as run,
        pytest.raises(StateMismatch, match=told),
    ):
        run.restore(state(0.0))


def optimizer(body: Json) -> Json:
    return body["values"]["state"]["optimizer"]["tree"]


@pytest.mark.parametrize(
    "change",
    [
        lambda b: optimizer(b).update(param_groups=None),
        lambda b: optimizer(b).pop("param_groups"),
        lambda b: optimizer(b).update(param_groups=[1]),
        lambda b: optimizer(b).update(param_groups=[{}]),
    ],
)
def test_values_of_an_optimizer_without_its_groups_are_refused_by_its_name(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_with(changed(change))
    with (
        everstep.Checkpointer(store=store, on_event=lambda *_, **__: None) as run,
        pytest.raises(StateMismatch, match="optimizer: the commit's values for it are malformed"),
    ):
        run.restore(state(0.0))
    assert "in _add\n" in caplog.text, "the log has the places, also where the fault is ours"


def test_deep_values_are_stepped_over() -> None:
    body = dumped(pristine()[1]).replace(b'"tree":2.0', b'"tree":' + b"[" * 5000 + b"]" * 5000)
    assert body != dumped(pristine()[1])
    attack(sealed(body), steps_over=True)


def test_key_that_is_there_twice_is_read_in_one_way() -> None:
    line = dumped(pristine()[1]).replace(b'"step":2', b'"step":2,"step":2,"shards":[],"entries":{}', 1)
    attack(sealed(line))


def test_claim_of_three_tebibytes_allocates_nothing(tmp_path: Path) -> None:
    record = changed(three_tebibytes)
    with bounded():
        assert restored(store_with(record)) is None, "it holds no optimizer: another state"
        assert loaded(store_with(record)) == 1.0
        assert len(Catalog(store_with(record)).verify()) == 1
        looked_at(store_with(record), tmp_path)


def cubes(axes: int) -> tuple[tuple[int, ...], list[Piece]]:
    """2 to the power of `axes` pieces, of which few begin at different places, on any axis."""
    offsets = (tuple(i >> a & 1 for a in range(axes)) for i in range(2**axes))
    return (2,) * axes, [Piece(0, "k", offset, (1,) * axes, 0, 4) for offset in offsets]


def squares(axes: int) -> tuple[tuple[int, ...], list[Piece]]:
    """As many, in a plane that no axis takes apart."""
    side = 2 ** (axes // 2)
    return (side, side), [Piece(0, "k", (i, j), (1, 1), 0, 4) for i in range(side) for j in range(side)]


def tiling_seconds(shape: tuple[int, ...], boxes: list[Piece]) -> float:
    """Of a tiling that is right, and of one in which two pieces are the same."""
    began = time.process_time()
    check_tiling(shape, boxes, "it")
    boxes[-1] = boxes[0]
    with pytest.raises(FormatError, match="overlap"):
        check_tiling(shape, boxes, "it")
    return time.process_time() - began


@pytest.mark.timeout(300)
@pytest.mark.long_but("squares")
@pytest.mark.parametrize("pieces", [cubes, squares])
def test_tiling_takes_time_by_the_bytes_of_a_record(
    pieces: Callable[[int], tuple[tuple[int, ...], list[Piece]]],
) -> None:
    """The largest record holds about 2^18 pieces. Compared with each other, even 2^14 take minutes."""
    few = min(tiling_seconds(*pieces(14)) for _ in range(3))
    assert few < SECONDS
    assert tiling_seconds(*pieces(18)) < 3 * 2**4 * few


@given(st.lists(st.integers(1, 4), max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_tiling_is_judged_as_by_counting_elements(shape: list[int], random: Random) -> None:
    def cut(offset: tuple[int, ...], size: tuple[int, ...], left: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        axes = [a for a, n in enumerate(size) if n > 1]
        if not axes or not left:
            return [(offset, size)]
        axis = random.choice(axes)
        at = random.randint(1, size[axis] - 1)
        low = (*size[:axis], at, *size[axis + 1 :])
        high = (*size[:axis], size[axis] - at, *size[axis + 1 :])
        moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
        return cut(offset, low, left - 1) + cut(moved, high, left - 1)

    boxes = [Piece(0, "k", o, s, 0, 0) for o, s in cut((0,) * len(shape), tuple(shape), 3)]
    check_tiling(tuple(shape), boxes, "it")
    if len(boxes) > 1:
        wrong = random.randrange(len(boxes))
        other = random.randrange(len(boxes) - 1)
        boxes[wrong] = boxes[other if other < wrong else other + 1]
        with pytest.raises(FormatError):
            check_tiling(tuple(shape), boxes, "it")


# -- what nobody has thought of


def places(body: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


ODD: list[Json] = [
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**40, 2**62, 2**63, 10**400, -(10**400), 1.5, -0.0, 1e308, math.nan,
    math.inf, "", "x", "F32", "BF16", "\ud800", "\udc00\ud800", "../../etc/passwd", "[/x]\x1b[31m", "a" * 5000,
    "0" * 32, [], {}, [[]], [0] * 70, list(range(1000)), {"$tensor": "nope"}, {"$tensor": "model/0.weight"},
    {"$ndarray": "model/0.weight"}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$dict": [[{"$dict": []}, 1]]},
    {"$dict": [["a", 1], [7, {}]]}, {"$tuple": 5}, {"$float": "x"}, {"$bytes": "?"}, {"$x": 1, "y": 2},
    {"kind": "value", "tree": 1}, {"kind": "module", "tree": {}}, {"state": {}, "param_groups": []},
    {"state": [], "param_groups": {"x": 1}}, {"params": "abc"}, {"params": [0, "x", 10**9]},
]  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    body = copy.deepcopy(pristine()[1])
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(body))
        *parents, last = draw(st.sampled_from(found))
        at = body
        for key in parents:
            at = at[key]
        match draw(st.sampled_from(["replace", "scale", "remove", "twice", "swap"])):
            case "replace":
                at[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case "scale" if isinstance(at[last], int):
                at[last] = draw(
                    st.sampled_from([at[last] - 1, at[last] + 1, at[last] * 2, at[last] * 2**40, -at[last]])
                )
            case "remove":
                del at[last]
            case "twice" if isinstance(at, list):
                at.append(copy.deepcopy(at[last]))
            case "swap":
                *others, other = draw(st.sampled_from(found))
                source = body
                try:
                    for key in (*others, other):
                        source = source[key]
                except (KeyError, IndexError, TypeError):
                    continue
                at[last] = copy.deepcopy(source)
            case _:
                at[last] = draw(st.sampled_from(["", 0, None]))
    return sealed(dumped(body))


quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.long
@quick
@given(mutations())
def test_mutated_record_gives_right_values_or_a_refusal(record: bytes) -> None:
    attack(record)


@pytest.mark.long
@settings(quick, max_examples=8)
@given(mutations())
def test_mutated_record_ends_no_command_with_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, record: bytes
) -> None:
    attack(record, tmp_path_factory.mktemp("hostile"))
