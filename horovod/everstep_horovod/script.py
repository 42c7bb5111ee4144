"""Tells by its text whether a script is elastic: `hvd.init` must know it before the script says so."""

from __future__ import annotations

import ast
import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from everstep.contract import env
from everstep.train.guards.sources import loaded_files

_NAMES = {"horovod", "everstep_horovod"}  # the names under which a script imports this package


def uses_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a file of the script names `hvd.elastic`. `EVERSTEP_HOROVOD_ELASTIC` (0 or 1) overrules the text."""
    if setting := environ.get(env.HOROVOD_ELASTIC, ""):
        return setting not in ("0", "false", "no")
    return any(names_elastic(text) for text in _texts())


def names_elastic(text: str) -> bool:
    """Whether the source text has `….elastic`, or imports it from Horovod."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="elastic"):
                return True
            case ast.ImportFrom(module=str(module), names=names) if _NAMES & set(module.split(".")):
                if "elastic" in module.split(".") or any(name.name == "elastic" for name in names):
                    return True
            case ast.Import(names=names):
                if any("elastic" in parts and _NAMES & parts for parts in (set(n.name.split(".")) for n in names)):
                    return True
            case _:
                pass
    return False


def _texts() -> list[str]:
    """The files of the script that are imported by now."""
    texts = []
    for file in loaded_files():
        if file.endswith(".py"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                texts.append(Path(file).read_text())
    return texts
