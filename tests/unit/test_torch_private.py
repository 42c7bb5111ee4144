"""Private names of libraries are touched in `everstep.torch_private` alone, all of them are in its table, and a missing
one is named at the start."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from everstep.contract import refusal
from everstep.torch_private import names
from everstep.torch_private.names import LibraryUnusable
from everstep.torch_private.table import TABLE, TESTED, Names

WORKER = Path(__file__).parents[2] / "worker"
SOURCES = WORKER / "everstep"
ROOM = "torch_private/"
OTHERS = [WORKER.parent / name for name in ("horovod", "sources")]

# Files that still touch private names themselves. Empty is the goal; nothing is added here.
REMAINING = (
    "rehearse/library_loop.py", "rehearse/own_loop.py",
)  # fmt: skip

# Of Python's own library, which is no subject here: names that it documents or that have no public way.
OF_PYTHON = {
    "_exit", "_getframe", "_current_frames", "_run_module_as_main", "_run_exitfuncs", "_register_atexit",
    "_threads_queues", "_fields", "_type_", "_DummyThread", "_lru_cache_wrapper",
}  # fmt: skip
# Ours or Python's, with the name of a library's: the file, and the attribute of an object that is not `self`.
OURS = {
    ("session.py", "_rank"), ("rehearse/watch.py", "_rank"), ("recovery/ddp/uneven_inputs.py", "_everstep_enable"),
    ("rehearse/process_end.py", "_shutdown"),
}  # fmt: skip
# Texts that are compared or shown, and not asked for; methods of torch's class that ours overrides.
SHOWN = {
    ("contract/calls.py", "_allgather_base"), ("contract/calls.py", "_reduce_scatter_base"),
    ("recovery/group/recoverable.py", "_allgather_base"), ("recovery/group/recoverable.py", "_reduce_scatter_base"),
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def is_own(receiver: ast.expr) -> bool:
    return isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that a file defines: functions, classes, variables, and attributes of `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(ctx=ast.Store(), value=receiver, attr=name) if is_own(receiver):
                yield name
            case ast.Name(ctx=ast.Store(), id=name):
                yield name


@cache
def trees() -> dict[str, ast.Module]:
    """By the name of its file."""
    paths = [(folder, path) for folder in (SOURCES, *OTHERS) for path in sorted(folder.rglob("*.py"))]
    return {str(path.relative_to(folder)): ast.parse(path.read_text()) for folder, path in paths}


@cache
def ours_anywhere() -> frozenset[str]:
    return frozenset(name for tree in trees().values() for name in defined(tree) if is_private(name))


@cache
def set_by_ours() -> frozenset[str]:
    """Attributes that a class of ours sets of itself: its subclasses, in other files, read them."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return frozenset(n.attr for n in nodes if isinstance(n.ctx, ast.Store) and is_own(n.value))


IN_TABLE = {name for row in TABLE for name in row.names.split()}


def touched(file: str, tree: ast.AST) -> Iterator[str]:
    """The private names of libraries that a file touches, each with its line."""
    own, everywhere, of_self = set(defined(tree)), ours_anywhere(), set_by_ours()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases):
                parts = [*module.split("."), *(alias.name for alias in aliases)]
                if is_of_library(module) and (found := [part for part in parts if is_private(part)]):
                    yield f"{file}:{node.lineno}: import of {module}: {found[0]}"
            case ast.Import(names=aliases):
                for alias in aliases:
                    if is_of_library(alias.name) and any(map(is_private, alias.name.split("."))):
                        yield f"{file}:{node.lineno}: import of {alias.name}"
            case ast.Attribute(value=receiver, attr=name) if is_private(name) and name not in OF_PYTHON:
                if is_own(receiver):
                    theirs = name not in everywhere or (name in IN_TABLE and name not in own and name not in of_self)
                else:
                    theirs = name not in everywhere or name in IN_TABLE
                if theirs and not any(file.endswith(end) and name == one for end, one in OURS):
                    yield f"{file}:{node.lineno}: .{name}"
            case ast.Constant(value=str(name)) if name in IN_TABLE and is_private(name) and (file, name) not in SHOWN:
                yield f"{file}:{node.lineno}: {name!r}"


def is_of_library(module: str) -> bool:
    top = module.split(".", maxsplit=1)[0]
    return top not in sys.stdlib_module_names and top != "everstep"


def holder_of(row: Names) -> Any:
    parts = row.holder.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise AssertionError(row.holder)


def outside(find: Callable[[str, ast.AST], Iterator[str]]) -> list[str]:
    """What it finds in the files that are not of the room, and not excused."""
    files = [(file, tree) for file, tree in trees().items() if not file.startswith((ROOM, *REMAINING))]
    return [line for file, tree in files for line in find(file, tree)]


def test_no_file_but_those_of_the_room_touches_a_private_name_of_a_library() -> None:
    found = outside(touched)
    assert found == [], "put a function for it into everstep/torch_private, and the name into its table"


def test_each_file_that_is_excused_still_needs_it() -> None:
    for place in REMAINING:
        files = [(file, tree) for file, tree in trees().items() if file.startswith(place)]
        assert any(any(touched(file, tree)) for file, tree in files), f"{place} touches none: take it out of REMAINING"


def patched(file: str, tree: ast.AST) -> Iterator[str]:
    """Assignments to attributes of what a file imports from a library."""
    imported: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if is_of_library(module):
                imported |= {alias.asname or alias.name for alias in aliases}
            case ast.Import(names=aliases):
                imported |= {alias.asname or alias.name.split(".")[0] for alias in aliases if is_of_library(alias.name)}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        match node:
            case ast.Assign(targets=found):
                targets = [one for target in found for one in getattr(target, "elts", [target])]
            case ast.Call(func=ast.Name(id="setattr"), args=[holder, *_]):
                targets = [ast.Attribute(value=holder, attr="?")]
        for target in targets:
            root: ast.expr = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in imported:
                yield f"{file}:{getattr(node, 'lineno', 0)}: {root.id}"


def test_no_file_but_those_of_the_room_replaces_what_is_a_librarys() -> None:
    found = outside(patched)
    assert found == [], "use everstep.torch_private.patches, which takes back only what is still ours"
    for source in (
        "from torch.nn import Module\nModule.forward = ours", "import torch\nsetattr(torch.nn.Module, 'forward', ours)",
        "import torch.distributed as dist\nold, dist.barrier = dist.barrier, ours",
    ):  # fmt: skip
        assert list(patched("new.py", ast.parse(source))), source
    assert not list(patched("new.py", ast.parse("import sys\nsys.excepthook = ours\nmodel.training = True")))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import torch._dynamo", "import of torch._dynamo"),
        ("from torch.nn.parallel.distributed import _DDPJoinHook", "import of torch.nn.parallel.distributed"),
        ("from torch._C import anything", "import of torch._C"),
        ("from torch.utils.data import _utils", "import of torch.utils.data"),
        ("def read(module): return module._buffers", "._buffers"),
        ("def _buffers(module): return module._buffers", "._buffers"),
        ("class Own(DeviceMesh):\n    def sizes(self): return self._rank_map", "._rank_map"),
        ("torch._foreach_abs_(tensors)", "._foreach_abs_"),
        ("getattr(module, '_non_persistent_buffers_set')", "'_non_persistent_buffers_set'"),
        ("replaced.put('_pre_forward', make, ddp)", "'_pre_forward'"),
    ],
)
def test_a_file_that_touches_one_is_found(source: str, line: str) -> None:
    assert any(line in found for found in touched("new.py", ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import _random",
        "frame = sys._getframe(1)",
        "class Own:\n    def __init__(self): self._rank = 0\n    def rank(self): return self._rank",
        "from everstep.cli._own import name",
        "text = 'a module has _buffers'",
    ],
)
def test_a_file_that_touches_none_passes(source: str) -> None:
    assert list(touched("new.py", ast.parse(source))) == []


def test_each_name_of_the_room_is_in_the_table_for_its_module_and_the_other_way_round() -> None:
    for file, tree in trees().items():
        if not file.startswith(ROOM):
            continue
        module = Path(file).stem
        listed = {name for row in TABLE if row.module == module for name in row.names.split()}
        parts = {part for row in TABLE for part in row.holder.split(".")}  # `torch._C._distributed_c10d`
        own, used = set(defined(tree)), set[str]()
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) | ast.Constant(value=str(name)) | ast.alias(name=name):
                    used.add(name)
                case ast.FunctionDef(name=name) | ast.keyword(arg=str(name)):
                    used.add(name)
        if module not in ("names", "table", "patches"):
            lacking = {name for name in used if is_private(name)} - listed - own - parts - {"_rank", "_init_backend"}
            assert sorted(lacking) == [], f"{file}: add them to the table"
        assert sorted(listed - used) == [], f"{file}: take them out of the table"
    modules = {Path(file).stem for file in trees() if file.startswith(ROOM)}
    excused = {place.rstrip("/").replace("/", ".") for place in REMAINING}
    assert {row.module for row in TABLE} <= modules | excused


def test_each_row_says_what_for_since_when_and_what_instead() -> None:
    for row in TABLE:
        assert all([row.why, row.since, row.instead, row.names]), row
        assert row.library in TESTED, row


def test_each_function_of_the_room_says_what_it_is_for() -> None:
    for file, tree in trees().items():
        if file.startswith(ROOM):
            functions = [node for node in getattr(tree, "body", []) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            assert [f.name for f in functions if not is_private(f.name) and ast.get_docstring(f) is None] == [], file


@pytest.mark.long
def test_the_installed_libraries_have_all_names_also_in_parts_that_are_imported_late() -> None:
    absent, missing = names.look()
    assert missing == []
    for row in TABLE:
        if row.library not in absent:
            holder_of(row)
    assert set(absent) <= {"litdata"}, "`make soak` has it in an environment of its own"
    for library in TESTED:
        names.check(library)


def test_missing_name_is_given_with_its_use_and_the_versions_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.parallel import distributed  # noqa: PLC0415  beside what is taken from it

    monkeypatch.delattr(distributed, "_DDPJoinHook")
    monkeypatch.delattr(torch.nn.parallel.DistributedDataParallel, "_pre_forward")
    with pytest.raises(LibraryUnusable) as raised:
        names.check()
    words = str(raised.value)
    assert words.startswith(f"PyTorch {torch.__version__} lacks what Everstep uses of it: ")
    assert "torch.nn.parallel.distributed._DDPJoinHook (what a rank without inputs does in `join`)" in words
    assert 'pip install "torch>=2.13,<2.14"' in words
    assert refusal.find(raised.value) is not None, "another start would end the same"


def test_start_of_a_script_names_what_is_missing(tmp_path: Path) -> None:
    """Where a module of ours imports the name, too: its ImportError would name no version."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed, torch.nn.parallel.distributed as ddp, everstep\n"
        "del ddp._DDPJoinHook\n"
        "everstep.start()\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert "lacks what Everstep uses of it: torch.nn.parallel.distributed._DDPJoinHook" in ended.stderr
    assert 'works with torch>=2.13,<2.14: pip install "torch>=2.13,<2.14"' in ended.stderr


def test_part_of_torch_that_is_not_imported_is_not_imported_for_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Names("groups", "torch.distributed.none_of_that", "_any", "", "", "")
    assert names.missing([row]) == []
    monkeypatch.setitem(sys.modules, "torch.distributed.none_of_that", ModuleType("none_of_that"))
    assert names.missing([row]) == [(row, "torch.distributed.none_of_that._any")]


def test_versions_are_those_that_the_distribution_asks_for() -> None:
    project = tomllib.loads((WORKER / "pyproject.toml").read_text())["project"]
    extras = [one for extra in project.get("optional-dependencies", {}).values() for one in extra]
    asked = {one for one in [*project["dependencies"], *extras] if one.startswith("torch>")}
    assert asked == {TESTED["torch"]}


def test_look_takes_little_of_a_start() -> None:
    def seconds(work: Callable[[], object]) -> float:
        before = time.process_time()
        work()
        return time.process_time() - before

    def count() -> int:
        return sum(range(250_000))

    least, beside = (min(seconds(work) for _ in range(20)) for work in (names.check, count))
    print(f"the look for {sum(len(row.names.split()) for row in TABLE)} names: {least * 1000:.1f} ms")
    assert least < 2 * beside, f"2 ms where a sum of 250,000 numbers takes 3; that took {beside * 1000:.1f} ms"
