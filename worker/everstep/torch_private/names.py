"""Looks whether the installed libraries have the private names that Everstep uses: those of `table`.

At a start, in the parts that are imported by then: to import others would take seconds. `everstep doctor` imports all.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, Final

from everstep.contract.refusal import Refusal
from everstep.torch_private.table import TABLE, TESTED, Names

SHOWN: Final = 8  # missing names that an error lists
ASIDE: Final = (("accelerate", "transformers"),)  # they take as long as all others but torch together


class LibraryUnusable(Refusal, RuntimeError):
    """An installed library lacks names that Everstep uses."""


def check(library: str = "torch") -> None:
    """Raise `LibraryUnusable` if a name is missing in the imported parts of the library."""
    lacking = missing([row for row in TABLE if row.library == library])
    if lacking:
        lines = "; ".join(f"{name} ({row.why})" for row, name in lacking[:SHOWN])
        more = f", and {len(lacking) - SHOWN} more" * (len(lacking) > SHOWN)
        raise LibraryUnusable(
            f"{'PyTorch' if library == 'torch' else library} {version_of(library)} lacks what Everstep uses of it: "
            f"{lines}{more}. Everstep {version_of('everstep')} works with {TESTED[library]}: pip install "
            f'"{TESTED[library]}"'
        )


@functools.cache
def check_once() -> None:
    """As `check`; the second call does nothing."""
    check()


def look() -> tuple[list[str], list[tuple[Names, str]]]:
    """Import all that the table names. Returns the libraries that are not installed, and the names that the others
    lack, each with its row."""
    import multiprocessing  # noqa: PLC0415  every start imports this module, and calls this nowhere
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415

    absent = [library for library in TESTED if importlib.util.find_spec(library) is None]
    rows = [row for row in TABLE if row.library not in absent]
    lacking = _look_at([row for row in rows if row.library == "torch"])
    # The others import torch: they are looked at side by side in copies of a process that has it.
    parts = [[row for row in rows if row.library in part] for part in ASIDE]
    parts.append([row for row in rows if row.library not in {"torch", *chain(*ASIDE)}])
    with ProcessPoolExecutor(len(parts), multiprocessing.get_context("fork")) as processes:
        for part in processes.map(_look_at, parts):
            lacking += part
    return absent, lacking


def _look_at(rows: Sequence[Names]) -> list[tuple[Names, str]]:
    """Import what the rows name, and find what is missing of it."""
    for row in rows:
        _import(row.holder)
    return missing(rows) + [(row, row.holder) for row in rows if _is_gone(row.holder)]


def version_of(library: str) -> str:
    """The installed version; "unknown" if it is not installed as a distribution of that name."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def missing(table: Sequence[Names]) -> list[tuple[Names, str]]:
    """The rows of which names are missing in what is imported, each with the full name."""
    absent: list[tuple[Names, str]] = []
    for row in table:
        try:
            holder = _imported(row.holder)
        except AttributeError:
            absent.append((row, row.holder))
            continue
        if holder is not None:
            there = set(dir(holder))
            lacking = [name for name in row.names.split() if name not in there]
            if lacking:  # attributes that its methods use are looked for only then, because it takes longer
                there.update(names_of(holder))
            absent += [(row, f"{row.holder}.{name}") for name in lacking if name not in there]
    return absent


def names_of(holder: Any) -> Iterator[str]:
    """The names of a module or class, with those that its functions use of their objects."""
    yield from vars(holder) if isinstance(holder, ModuleType) else dir(holder)
    for kind in getattr(holder, "__mro__", (holder,)):
        yield from vars(kind).get("__annotations__", ())
        for member in list(vars(kind).values()):
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(function, FunctionType):
                yield from function.__code__.co_names


def _import(path: str) -> None:
    """Import the modules of a path, as far as it consists of modules."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        try:
            importlib.import_module(".".join(parts[:end]))
        except ImportError:
            return


def _is_gone(path: str) -> bool:
    """Whether a module or class is not there although all was imported."""
    try:
        return _imported(path) is None
    except AttributeError:
        return False  # `missing` has it


def _imported(path: str) -> Any:
    """The module or class; None if its module is not imported. Raises AttributeError."""
    module, _, rest = path, "", ""
    while module not in sys.modules and "." in module:
        module, _, last = module.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    holder: Any = sys.modules.get(module)
    if holder is None:
        return None
    for name in rest.split(".") if rest else ():
        if isinstance(holder, ModuleType) and name not in vars(holder) and hasattr(holder, "__path__"):
            return None  # a module of a package that is not imported, or a name that the package makes when asked
        holder = getattr(holder, name)
    return holder
