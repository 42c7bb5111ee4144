"""Turns a forked process into the training program; it is the first module to run there.

The program runs as with `python script.py`: with its own environment, arguments, `sys.path`, `__main__` and random
numbers. Invariant: an error that ends it is written to the error file, with its traceback, and to the pod's termination
message.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everstep.agent.startable import NOT_EXECUTABLE, NOT_FOUND, NOT_READABLE
from everstep.contract import error_file, exit_codes, refusal, refusal_output, termination
from everstep.contract.main_script import ScriptUnreadable, main_module, run_script
from everstep.contract.script_end import ScriptEnd

# A process ends with these by this library itself.
_OWN_CODES = (exit_codes.FENCED, exit_codes.STORE_UNUSABLE, exit_codes.PREEMPTED, exit_codes.NOT_RECOVERED)
STACKS_SIGNAL = signal.SIGUSR2
MORE_LIKELY = 100  # added to oom_score_adj, so that the kernel kills the process rather than the agent


def main(command: Mapping[str, Any]) -> None:
    """Run the command's program in this process. Raises the program's errors, and SystemExit."""
    for descriptor, path in ((1, command["stdout"]), (2, command["stderr"])):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(opened, descriptor)
            os.close(opened)
    for stream in (sys.stdout, sys.stderr):  # whole lines: with torchrun's `python -u`, lines of processes mix
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(command["environment"])
    time.tzset()
    _prefer_for_oom()
    if command.get("cpus"):
        os.sched_setaffinity(0, command["cpus"])
    if command["kind"] == "stores":
        from everstep.agent.processes import stores  # noqa: PLC0415 - imports torch

        stores.main()
        return
    target, arguments = command["target"], list(command["arguments"])
    if command["executable"]:
        _execute(target, arguments)
    # The fault handler is C code, so it also works in a process that holds the interpreter's lock for ever.
    stacks = open(command["stacks"], "a")  # noqa: SIM115 - as long as the process
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    _draw_others()
    hook = sys.excepthook
    sys.excepthook = lambda *error: _report_error(hook, *error)
    try:
        if command["module"]:
            _run_module(target, arguments)
        else:
            _run(target, arguments)
    except SystemExit as e:
        ScriptEnd.failed = e.code not in (None, 0)
        ends = type(e) is SystemExit and e.code not in _OWN_CODES
        if ends and (refused := refusal.find(e)) is not None:
            error_file.write(e)
            termination.write_error(e)
            refusal_output.show(refused, "the script has caught it, and called sys.exit()")
            raise SystemExit(1) from e
        if type(e) is SystemExit and e.code not in (None, 0) and (message := _message(e)):
            termination.write(message, e.code if isinstance(e.code, int) else 1, [])
        raise


def _prefer_for_oom() -> None:
    """When memory runs out, the kernel should kill this process, not the agent."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            now = int(file.read())
            file.seek(0)
            file.write(str(min(1000, now + MORE_LIKELY)))
    except (OSError, ValueError):
        pass


def _draw_others() -> None:
    """Seed the random numbers. Otherwise all processes would begin with those of their parent."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _run_module(name: str, arguments: Sequence[str]) -> None:
    """As `python -m`. `runpy.run_module` would put the `__main__` of before back after the program's last line."""
    sys.argv, sys.path[0] = [name, *arguments], os.getcwd()
    main_module()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # not public: the interpreter itself calls it


def _run(path: str, arguments: Sequence[str]) -> None:
    try:
        run_script(path, arguments)
    except ScriptUnreadable as e:
        # The agent has seen the file (see `startable`), so it was removed since.
        cannot_start(f"can't open file {os.path.abspath(path)!r}: {e}", NOT_READABLE)


def cannot_start(why: str, code: int) -> NoReturn:
    """End this process with this termination message, because its program cannot be started."""
    sys.stderr.write(f"everstep-run: {why}\n")
    termination.write(why, code, [])
    sys.exit(code)


def _execute(target: str, arguments: list[str]) -> NoReturn:
    try:
        os.execvp(target, [target, *arguments])  # noqa: S606 - a program of the user's
    except OSError as e:
        code = NOT_FOUND if isinstance(e, FileNotFoundError) else NOT_EXECUTABLE
        cannot_start(f"can't run {target!r}: {e.strerror}", code)


def _message(end: SystemExit) -> str:
    """The message of a program that ends without an error: `sys.exit("words")`, or argparse with a wrong argument."""
    if not isinstance(end.code, int):
        return str(end.code)
    trace = end.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "error" and trace.tb_frame.f_globals.get("__name__") == "argparse":
            return f"{sys.argv[0]}: error: {trace.tb_frame.f_locals.get('message')}"
        trace = trace.tb_next
    return ""


def _report_error(hook: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    ours = (str(Path(__file__).parent), run_script.__code__.co_filename, "<frozen")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    with contextlib.suppress(Exception):
        error_file.write(error)
    with contextlib.suppress(Exception):
        if not isinstance(error, KeyboardInterrupt):
            termination.write_error(error)
    with refusal_output.in_place_of_traceback(error):
        hook(kind, error.with_traceback(trace), trace)
