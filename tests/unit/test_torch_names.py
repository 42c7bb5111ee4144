"""Each private name of torch that Everstep uses is in one table, and a missing one is told by name at the start."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from everstep.contract import refusal
from everstep.recovery import torch_names
from everstep.recovery.torch_names import TABLE, Names, TorchUnusable

WORKER = Path(__file__).parents[2] / "worker"
SOURCES = WORKER / "everstep"
FILES = {str(path.relative_to(SOURCES)): ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}

# Names that begin with `_` and are neither ours nor torch's.
OF_OTHERS = {
    "os": {"_exit"}, "sys": {"_getframe", "_current_frames"}, "functools": {"_lru_cache_wrapper"},
    "runpy": {"_run_module_as_main"}, "atexit": {"_run_exitfuncs"},
    "threading": {"_DummyThread", "_register_atexit"}, "concurrent.futures.thread": {"_threads_queues"},
    "random": {"_inst"}, "numpy.random": {"_rand"}, "aiohttp": {"_dns_host"},
    "fsspec": {"_call_s3", "_location", "_request", "_strip_protocol"}, "litdata": {"_COMPRESSORS"},
    "accelerate": {"_custom_objects", "_dataloaders", "_models", "_schedulers", "_set_sync_gradients", "_shared_state"},
    "transformers": {"_created_lr_scheduler", "_finalize_training", "_load_from_checkpoint", "_maybe_log_save_evaluate",
                     "_tr_loss"},
    "lightning": {"_broadcast_sigterm_tensor", "_callback_metrics", "_combined_loader", "_current_fx_name",
                  "_data_fetcher", "_restarting", "_sync_ddp", "_data_source", "_detect_anomaly", "_logger_connector",
                  "_module_mode", "_wrap_closure"},
}  # fmt: skip
OURS = {"_everstep_enable"}  # put on an object of torch
# Written in texts, and not asked for.
SHOWN = {("contract/calls.py", "_allgather_base"), ("contract/calls.py", "_reduce_scatter_base")}
PARTS = {part for row in TABLE for part in row.holder.split(".")}  # `torch._C._distributed_c10d`


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self" | "cls"), attr=name):
                yield name
            case ast.Name(ctx=ast.Store(), id=name):
                yield name


def used(tree: ast.AST) -> Iterator[str]:
    """Private names that may be another's: attributes of other objects than `self`, and whole texts."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) | ast.alias(name=name) if is_private(name):
                yield name


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What is imported from private modules of torch: module and name."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if isinstance(sys.modules.get(path), ModuleType):
                    modules[alias.asname or alias.name] = path
                elif "._" in node.module:
                    yield node.module, alias.name
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if "._" in modules.get(name, ""):
                if not isinstance(getattr(sys.modules[modules[name]], attribute, None), ModuleType):
                    yield modules[name], attribute


def of_torch() -> set[str]:
    """The private names of all holders in the table, and of their objects."""
    found: set[str] = set()
    for row in TABLE:
        found.update(name for name in torch_names._names(holder_of(row)) if is_private(name))
    return found


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


def is_listed(file: str, name: str, holder: str | None = None) -> bool:
    return any(
        name in row.names.split() and file.startswith(tuple(row.used_in.split())) and holder in (None, row.holder)
        for row in TABLE
    )


def test_each_private_name_of_torch_in_the_sources_is_in_the_table_with_its_place() -> None:
    private = of_torch()
    lacking = {
        f"{file}: {name}"
        for file, tree in FILES.items() if file != "recovery/torch_names.py"
        for name in set(used(tree)) - set(defined(tree)) - PARTS
        if name in private and (file, name) not in SHOWN and not is_listed(file, name)
    }  # fmt: skip
    lacking |= {
        f"{file}: {module}.{name}"
        for file, tree in FILES.items() for module, name in imported(tree) if not is_listed(file, name, module)
    }  # fmt: skip
    assert not lacking, "add them to everstep/recovery/torch_names.py, with the reason"


def test_private_attribute_is_ours_or_its_library_is_known() -> None:
    """So that a new one of a part of torch that the table does not know yet is noticed."""
    ours = {name for tree in FILES.values() for name in defined(tree)}
    known = ours.union(OURS, *OF_OTHERS.values(), PARTS, *(row.names.split() for row in TABLE))
    attributes = {
        f"{file}: {node.attr}"
        for file, tree in FILES.items() for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in known
    }  # fmt: skip
    assert sorted(attributes) == [], "names of torch belong into recovery/torch_names.py, those of others above"


def test_each_row_of_the_table_is_used_where_it_says() -> None:
    texts = {file: (SOURCES / file).read_text() for file in FILES}
    for row in TABLE:
        for place in row.used_in.split():
            here = [text for file, text in texts.items() if file.startswith(place)]
            assert any(name in text for text in here for name in row.names.split()), f"{row.holder}: not in {place}"
        for name in row.names.split():
            assert any(name in text for file, text in texts.items() if is_listed(file, name)), f"{row.holder}.{name}"


def test_the_installed_torch_has_all_names_also_in_parts_that_are_imported_late() -> None:
    for row in TABLE:
        holder_of(row)
    assert torch_names._missing(TABLE) == []
    torch_names.check()


def test_missing_name_is_told_with_its_use_and_the_versions_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.parallel import distributed  # noqa: PLC0415  beside what is taken from it

    monkeypatch.delattr(distributed, "_DDPJoinHook")
    monkeypatch.delattr(torch.nn.parallel.DistributedDataParallel, "_pre_forward")
    with pytest.raises(TorchUnusable) as raised:
        torch_names.check()
    said = str(raised.value)
    assert said.startswith(f"PyTorch {torch.__version__} lacks what Everstep uses of it: ")
    assert "torch.nn.parallel.distributed._DDPJoinHook (what a rank without inputs does in `join`)" in said
    assert 'pip install "torch>=2.13,<2.14"' in said
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
    row = Names("torch.distributed.none_of_that", "", "_any", "")
    assert torch_names._missing([row]) == []
    monkeypatch.setitem(sys.modules, "torch.distributed.none_of_that", ModuleType("none_of_that"))
    assert torch_names._missing([row]) == [(row, "torch.distributed.none_of_that._any")]


def test_versions_are_those_that_the_distribution_asks_for() -> None:
    project = tomllib.loads((WORKER / "pyproject.toml").read_text())["project"]
    extras = [one for extra in project.get("optional-dependencies", {}).values() for one in extra]
    asked = {one for one in [*project["dependencies"], *extras] if one.startswith("torch>")}
    assert asked == {torch_names.VERSIONS}


def test_look_takes_little_of_a_start() -> None:
    def seconds() -> float:
        before = time.process_time()
        torch_names.check()
        return time.process_time() - before

    assert min(seconds() for _ in range(10)) < 0.02, "3 ms where nothing else runs"
