"""Runs an unmodified Horovod script: `everstep-run -m everstep_horovod train.py …`."""

from __future__ import annotations

import argparse
import sys

from everstep.contract.main_script import ScriptUnreadable, run_script
from everstep_horovod import install


def main(arguments: list[str]) -> None:
    """Run the script as the interpreter would."""
    parser = argparse.ArgumentParser(
        prog="everstep-run -m everstep_horovod",
        description="Runs a script that imports horovod.torch; see docs/reference/horovod.md.",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args(arguments)
    install()
    try:
        run_script(options.script, options.arguments)
    except ScriptUnreadable as e:
        parser.error(f"{options.script}: {e}")


if __name__ == "__main__":
    main(sys.argv[1:])
