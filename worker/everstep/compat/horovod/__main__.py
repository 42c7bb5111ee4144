"""Runs an unmodified Horovod script: `everstep-run -m everstep.compat.horovod train.py …`."""

from __future__ import annotations

import builtins
import io
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from everstep.compat.horovod import install

USAGE = "usage: everstep-run -m everstep.compat.horovod SCRIPT [ARGUMENT …]"


def main(arguments: list[str]) -> None:
    """Run the script as the interpreter would."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit(USAGE)
    path = os.path.abspath(arguments[0])
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as e:
        sys.exit(f"{USAGE}\n{arguments[0]}: {e.strerror}")
    install()
    sys.argv = list(arguments)
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
