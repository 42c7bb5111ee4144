"""Runs an unmodified Horovod script: `everstep-run -m everstep.compat.horovod train.py …`."""

from __future__ import annotations

import argparse
import builtins
import io
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from everstep.compat.horovod import install


def main(arguments: list[str]) -> None:
    """Run the script as the interpreter would."""
    parser = argparse.ArgumentParser(
        prog="everstep-run -m everstep.compat.horovod",
        description="Runs a script that imports horovod.torch; see docs/reference/horovod.md.",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own")
    asked = parser.parse_args(arguments)
    path = os.path.abspath(asked.script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as e:
        parser.error(f"{asked.script}: {e.strerror}")
    install()
    sys.argv = [asked.script, *asked.arguments]
    sys.path[0] = os.path.dirname(path)
    # It stays `__main__` until the process ends: functions of `atexit` find the script's classes there.
    module = ModuleType("__main__")
    module.__dict__.update(
        __builtins__=builtins, __annotations__={}, __file__=path, __loader__=SourceFileLoader("__main__", path)
    )
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  the script is the purpose


if __name__ == "__main__":
    main(sys.argv[1:])
