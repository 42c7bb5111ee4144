"""The command `everstep-run`: our agent with torchrun's command line.

For a rendezvous of torch's own (`c10d`, `static`), this process becomes torchrun.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from everstep.agent.arguments import Arguments, UsageError, read
from everstep.agent.loop import Agent
from everstep.agent.processes.client import ForkServerError
from everstep.agent.processes.control_socket import StoresUnavailable
from everstep.agent.processes.environ import DEBUG
from everstep.agent.processes.faults import FirstError
from everstep.agent.processes.program import cannot_start
from everstep.agent.startable import problem
from everstep.contract import env, variables
from everstep.contract.error_file import PATH as ERROR_FILE
from everstep.membership.errors import RendezvousFailed

log = logging.getLogger("everstep.agent")

USAGE = 2


async def _run(arguments: Arguments) -> int:
    return await Agent(arguments, os.environ).run()


def main(argv: list[str] | None = None, run: Callable[[Arguments], Coroutine[Any, Any, int]] = _run) -> None:
    """Run the agent, as `run` does, and end Python with its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    level = os.environ.get("EVERSTEP_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        names = ", ".join(logging.getLevelNamesMapping())
        sys.exit(_usage(UsageError(f"EVERSTEP_LOG_LEVEL={level}: one of {names} is expected")))
    logging.basicConfig(
        level=level,
        format="%(asctime)s.%(msecs)03d everstep-run: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    try:
        if (debug := os.environ.get(env.DEBUG, "")).lower() not in ("", *DEBUG):
            raise UsageError(f"{env.DEBUG}={debug}: one of {', '.join(DEBUG)} is expected")
        arguments = read(argv, os.environ)
        if importlib.util.find_spec("torch") is None:  # needed for torchrun, and for the rounds' stores
            raise UsageError("the package torch is missing: pip install 'everstep[worker]'")
        for unknown in variables.unknown(os.environ):
            log.warning("%s", unknown)
        if (hopeless := problem(arguments.program)) is not None:
            if path := os.environ.get(ERROR_FILE):
                FirstError().write(path, hopeless.code, hopeless.why)
            cannot_start(hopeless.why, hopeless.code)
        if not arguments.ours:
            log.info("--rdzv-backend=%s is torch's: torchrun does it, without a fork server", arguments.backend)
            os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *argv])  # noqa: S606
        if arguments.unused:
            log.warning("%s: without meaning here; see docs/reference/everstep-run.md", ", ".join(arguments.unused))
        code = asyncio.run(run(arguments))
    except UsageError as e:
        sys.exit(_usage(e))
    except KeyboardInterrupt:  # Ctrl-C before the processes start, or after their end
        log.error("interrupted")
        sys.exit(128 + signal.SIGINT)
    except (RendezvousFailed, ForkServerError, StoresUnavailable) as e:
        log.error("%s", e)
        sys.exit(1)
    sys.exit(code)


def _usage(error: UsageError) -> int:
    sys.stderr.write(f"everstep-run: {error}\n")
    return USAGE


if __name__ == "__main__":
    main()
