"""DataLoader workers that do not outlive their trainer.

A worker of a SIGKILLed trainer can live on: stock workers look at their parent only while they wait for work, and one
that is blocked in the dataset or in a full pipe never does. It then holds memory, and copies of the trainer's sockets,
so that peers do not even see the connection break. Each worker is therefore killed by the kernel with its parent, or,
where that is not possible, ends itself when the trainer's pidfd says so. Nor does a worker end before its trainer has
decided to. Knows nothing of datasets.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_LINUX: Final = sys.platform == "linux"
# Loaded here, in the parent: a forked worker of a process with threads should load as little as it can.
_libc: Final = ctypes.CDLL(None, use_errno=True) if _LINUX else None

DEFAULT_CONTEXT: Final = "fork" if _LINUX else None


class WorkerStart:
    """A worker's first call: it makes the worker end with the trainer, then calls the user's own `worker_init_fn`."""

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self._then = then
        self._trainer = os.getpid()
        self._by_main_thread = True

    def about_to_start(self) -> None:
        """Called by the trainer just before its workers start.

        The kernel's signal comes when the *thread* that made the worker ends, so it is of use for the main thread only.
        """
        self._trainer = os.getpid()
        self._by_main_thread = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        bind_to(self._trainer, self._by_main_thread)
        leave_process_group(self._trainer)
        if self._then is not None:
            self._then(worker)


@contextmanager
def sigterm_held(multiprocessing_context: Any) -> Iterator[None]:
    """While workers start, in the trainer: what is sent meanwhile reaches it afterwards, and no worker.

    A worker that is forked or spawned inherits it. Those of multiprocessing's fork server inherit that one's, which may
    not hold it: loaders that are not the session's have their workers from it, too, and those would never hear their
    trainer's SIGTERM. So a signal to the whole group ends the fork server, and its workers with it."""
    context: Any = multiprocessing_context
    if context is None or isinstance(context, str):
        context = multiprocessing.get_context(context)
    method = context.get_start_method()
    if _LINUX and method != "fork":
        multiprocessing.resource_tracker.ensure_running()  # when it starts it lifts the block, so it has to run already
    if _LINUX and method == "forkserver":
        multiprocessing.forkserver.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group(trainer: int) -> None:
    """A signal to the trainer's whole group is for the trainer: on SIGTERM it may use its grace period to end a step,
    and its workers feed it until then. They still end with it, and by the signals that it sends them itself."""
    with suppress(OSError):  # where it may not, the group's signals reach the worker as ever
        os.setpgid(0, 0)
    if (
        _LINUX
        and (pending := signal.sigtimedwait([signal.SIGTERM], 0)) is not None
        and pending.si_pid in (trainer, os.getppid())
    ):
        os._exit(0)  # as torch's workers do on their trainer's word
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def bind_to(pid: int, by_main_thread: bool = True) -> None:
    """Make this process end, by SIGKILL, when process `pid` does. `by_main_thread`: of `pid`, if that is the parent."""
    if _libc is None:
        return
    if by_main_thread and os.getppid() == pid:
        if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: a worker could outlive its trainer")
        if os.getppid() != pid:  # it ended before the request was in place
            os.kill(os.getpid(), signal.SIGKILL)
        return
    try:
        trainer = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # a kernel or sandbox without pidfds: torch's own watch of the parent remains
        return
    threading.Thread(target=_end_with, args=(trainer,), name="everstep-trainer-watch", daemon=True).start()


def _end_with(trainer: int) -> None:
    """A pidfd becomes readable when its process ends."""
    poller = select.poll()
    poller.register(trainer, select.POLLIN)
    poller.poll()
    os.kill(os.getpid(), signal.SIGKILL)
