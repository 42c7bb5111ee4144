"""Sends progress reports from a training process to the operator, at no cost to training.

The operator measures recovery time, goodput and checkpoint age by these reports. So each process reports its start, its
restore and its first step after a (re)start at once. After that only rank 0 reports, at most twice a second.

It knows neither torch, nor the operator, nor the checkpoint engine: it uses the standard library and
`everstep.contract` only. Invariants: nothing here raises into training, blocks it, or synchronises a device. Memory is
bounded. An operator that is unreachable for an hour costs one log line. Without EVERSTEP_REPORT_URL every call does
nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import logging
import os
import resource
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from everstep.contract import env, redact, termination
from everstep.contract.messages import MAX_METRIC_NAME, MAX_METRICS, Phase, Report, is_refusal, words

# --- http post
# Makes one bounded HTTP POST, which follows the operator's redirect to its leader. It uses `http.client`, because
# `urllib.request` refuses to repeat a POST after a 307. It does not know what it sends. Every wait has a bound. The
# token is sent only to a redirect with the same scheme and path, as with the rendezvous. So a proxy that answers in the
# operator's place, and redirects to a page of its own, does not get it. Only the operator's own answers are final:
# another server answers in its place only for a while.

TIMEOUT = 2.0  # seconds, of connecting and of each read
MAX_REDIRECTS = 3
MAX_ANSWER = 16 * 1024


class PostError(Exception):
    """The message did not arrive. To repeat it later may help."""


class Refused(PostError):
    """The server refused the message. To repeat the same message cannot help."""


def post(url: str, token: str | None, body: bytes, context: ssl.SSLContext | None = None) -> None:
    """Deliver `body` as JSON; over https:// the server, and the leader to which it redirects, are verified by `context`
    under the host name of `url`. Raises Refused if the operator cannot accept it, and PostError for every other answer
    except its 204."""
    try:
        target = first = _parse(url)
    except ValueError as e:
        raise Refused(str(e)) from e
    for _ in range(MAX_REDIRECTS + 1):
        status, location, answer = _once(target, token, body, first.hostname, context)
        if status == 204:
            return
        if status in (307, 308) and location:
            target = _onward(target, location)
            continue
        reason = words(answer) or answer[:300].decode(errors="replace").strip() or "no reason given"
        text = f"{target.geturl()} answered {status}: {reason}"
        # 401 and 403 may pass soon: the token is being replaced, or the operator has not seen the pod yet.
        if is_refusal(status, answer) and status not in (401, 403):
            raise Refused(text)
        raise PostError(text)
    raise PostError(f"{url} redirects more than {MAX_REDIRECTS} times: the operator has no settled leader")


def _onward(target: SplitResult, location: str) -> SplitResult:
    try:
        onward = _parse(urljoin(target.geturl(), location))
    except ValueError as e:
        raise PostError(f"{target.geturl()} redirects to {location[:200]!r}: {e}") from e
    if (onward.scheme, onward.path, onward.query) != (target.scheme, target.path, target.query):
        raise PostError(
            f"{target.geturl()} redirects to {location[:200]!r}: only the same scheme and path at another host:port are"
            " followed, because the pod's token goes with it"
        )
    return onward


def _parse(url: str) -> SplitResult:
    """Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} is not an http or https URL")
    return parts


class _Https(http.client.HTTPConnection):
    """A leader is reached at its pod's address. Its certificate is the Service's, so it is verified under that name."""

    default_port = http.client.HTTPS_PORT

    def __init__(self, host: str, port: int | None, name: str, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=TIMEOUT)
        self._name, self._context = name, context

    def connect(self) -> None:
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._name)


def _once(
    target: SplitResult, token: str | None, body: bytes, name: str | None, context: ssl.SSLContext | None
) -> tuple[int, str | None, bytes]:
    assert target.hostname is not None
    assert name is not None
    connection: http.client.HTTPConnection
    if target.scheme == "https":
        connection = _Https(target.hostname, target.port, name, context or ssl.create_default_context())
    else:
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=TIMEOUT)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    path = (target.path or "/") + (f"?{target.query}" if target.query else "")
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.getheader("Location"), response.read(MAX_ANSWER)
    except http.client.HTTPException as e:
        raise PostError(f"{target.geturl()} broke off: {type(e).__name__} {e}") from e
    finally:
        connection.close()


# --- memory
# Measures the peak memory of this process. It uses the standard library only; the caller gives the device's figure. The
# figure does not contain the worker processes of a data loader. It contains the pages that a forked process shares with
# its fork server, as does every figure of resident memory.

LOOK_SECONDS = 10.0  # between two checks whether the peak has grown
GROWTH = 1.05  # a peak that grew by this factor is reported again


@dataclass(frozen=True, slots=True)
class Peak:
    """Peaks in bytes. `device`: that of the accelerator; None without one, or if it is unknown."""

    host: int = 0
    device: int | None = None


class PeakMemory:
    """The peak, and the last reported one. `device` returns that of the accelerator, in any thread."""

    def __init__(self) -> None:
        self.device: Callable[[], int] | None = None
        self._reported: Peak | None = None
        self._looked = 0.0  # when it was last reported or checked

    def read(self) -> Peak:
        """The peak so far, which counts as reported then. An error in `device` counts as an unknown figure."""
        self._looked = time.monotonic()
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        host = largest if sys.platform == "darwin" else largest * 1024
        try:
            peak = Peak(host, self.device() if self.device is not None else None)
        except Exception:  # a figure for people must not end the thread that reports
            peak = Peak(host)
        self._reported = peak
        return peak

    def grew(self, now: float) -> bool:
        """Whether the peak has grown enough to be reported again. This checks at most every `LOOK_SECONDS`; `now` is
        monotonic."""
        reported = self._reported
        if reported is None or now - self._looked < LOOK_SECONDS:
            return False
        peak = self.read()
        return peak.host > reported.host * GROWTH or (peak.device or 0) > (reported.device or 0) * GROWTH


# --- report

log = logging.getLogger("everstep.report")

MIN_INTERVAL = 0.5  # seconds between two steady progress reports
MAX_PENDING = 16  # reports kept while the operator is unreachable; the oldest are dropped first
BACKOFF_FIRST, BACKOFF_MAX = 0.25, 5.0  # seconds
FLUSH_SECONDS = 2.0
# The contract cuts longer texts. To cut them here keeps the report under its size bound.
MAX_ERROR = 500


@dataclass(slots=True)
class _Pending:
    report: Report
    metrics: dict[str, Any] = field(default_factory=dict)
    steady: bool = False  # a newer report may replace it, and it waits for MIN_INTERVAL


class Reporter:
    """Sends the reports of one training process from a thread of its own.

    Reports are sent in order; of several steady ones only the newest is kept. A report that could not be delivered is
    retried with back-off, while there is room in MAX_PENDING. So a recovery is measured even if the operator was being
    replaced. A forked child starts with an empty queue and its own thread. All methods may be called from any thread.
    """

    def __init__(
        self,
        url: str | None,
        token_file: str | None = None,
        *,
        ca: str = "",
        rank: int = 0,
        world_size: int = 1,
        round: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = url or None
        self._token_file = token_file or None
        self._ca = ca
        self._context: ssl.SSLContext | None = None
        self._identity = (rank, world_size, round)
        self._now = now
        self.memory = PeakMemory()
        self._reset()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Reporter:
        """The reporter of this process, from the variables that the operator and torchrun set."""
        return cls(
            environ.get(env.REPORT_URL),
            environ.get(env.TOKEN_FILE),
            ca=environ.get(env.CA_CERTIFICATES, ""),
            rank=_number(environ, "RANK", 0),
            world_size=_number(environ, "WORLD_SIZE", 1),
            round=_number(environ, env.ROUND, 0),
        )

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._queue: deque[_Pending] = deque(maxlen=MAX_PENDING)
        self._thread: threading.Thread | None = None
        self._in_flight = False
        self._flushing = False
        self._away = False  # whether the operator did not answer the last time; logged once
        self._logged: set[str] = set()
        self._known = Report(Phase.START, self._identity[0], self._identity[1], 0.0, round=self._identity[2])
        self._started = self._stepped = False
        self._metrics: dict[str, Any] = {}  # floats or detached CPU tensors, read on the reporter's thread
        self._mark: tuple[int, float] | None = None  # step and monotonic time of the previous report

    # Events of the training. Each of these methods returns at once and never raises.

    def started(self) -> None:
        """The process runs, and the process group may not exist yet. Sent once; every other call implies it."""
        self._offer(Phase.START)

    def restored(self, step: int | None, seconds: float | None = None) -> None:
        """State was read from the commit of `step` in `seconds`. None: there was no commit."""
        self._offer(Phase.RESTORE, mark=step or 0, restored_step=step, restore_seconds=seconds, step=step)

    def moved(self, rank: int, world_size: int, round: int) -> None:
        """The process goes on in another round. Its next step is reported at once, whatever its rank is."""
        with self._wake:
            self._identity = (rank, world_size, round)
            self._known = replace(
                self._known, rank=rank, world_size=world_size, round=round, straggler=None, straggler_rank=None
            )
            self._stepped, self._mark = False, None

    def step(
        self,
        step: int,
        *,
        total_steps: int | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """`step` optimizer steps are complete.

        Metrics (at most 8) are numbers or 0-d CPU tensors; a tensor is detached here and read later on the reporter's
        thread. One on an accelerator is left out, with one log line, because reading it would wait for the device.
        """
        known = {"total_steps": total_steps, "epoch": epoch}
        self._offer(
            Phase.TRAIN, step=int(step), metrics=metrics or {}, **{k: v for k, v in known.items() if v is not None}
        )

    def slow(self, what: str | None, rank: int | None = None) -> None:
        """Which rank the others wait for, in words and as a number (None: none). It is reported with the next steps."""
        words = redact.short(what, MAX_ERROR) if what else None
        with self._wake:
            self._known = replace(self._known, straggler=words, straggler_rank=rank)

    def rehearsed(self, what: str) -> None:
        """The program was rehearsed, and how. It is reported with the next steps."""
        with self._wake:
            self._known = replace(self._known, rehearsed=redact.short(what, MAX_ERROR))

    def committed(self, step: int, at: float | None = None) -> None:
        """The commit of `step` exists since `at`, in seconds since the epoch (default: now)."""
        self._offer(Phase.SAVE, committed_step=step, committed_at=at if at is not None else self._now())

    def save_failed(self, step: int | None, error: object) -> None:
        """The attempt to commit `step` failed, and training goes on."""
        text = f"step {step}: {error}" if step is not None else str(error)
        self._offer(Phase.SAVE_FAILED, checkpoint_error=redact.short(text, MAX_ERROR))

    def save_skipped(self) -> None:
        """A save was due while the one before was still being written. That one is not affected."""
        self._offer(Phase.SAVE_SKIPPED)

    def done(self) -> None:
        """Training is complete. Waits at most FLUSH_SECONDS for what is pending."""
        self._offer(Phase.DONE)
        self.flush(FLUSH_SECONDS)

    def on_event(self, kind: str, **fields: Any) -> None:
        """The hook that `everstep.Checkpointer` calls. Kinds without a report of their own are ignored."""
        with contextlib.suppress(Exception):
            match kind:
                case "restored":
                    self.restored(fields.get("step"), fields.get("seconds"))
                case "committed":
                    self.committed(fields["step"], fields.get("at"))
                case "save-failed":
                    self.save_failed(fields.get("step"), fields.get("error", "unknown error"))
                case "save-skipped":
                    self.save_skipped()
                case "stepped-over":
                    self._damaged(fields["n"], fields.get("error", ""))
                case "fenced":
                    # This error ends the process with its own exit code, and writes its reason to the termination log.
                    termination.write_error(fields["error"])
                case "unusable":
                    error = fields["error"]
                    termination.write_error(error)
                    self.save_failed(None, f"{type(error).__name__}: {error}")  # the operator looks for this name
                    self.flush()
                case _:
                    log.debug("no report for checkpoint event %r", kind)

    def _damaged(self, n: int, error: object) -> None:
        """A commit was skipped in favour of an older one. This is reported with the restore to which it belongs."""
        self.started()
        with self._wake:
            text = f"log record {n} is stepped over: {error}"
            self._known = replace(self._known, checkpoint_error=redact.short(text, MAX_ERROR))

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Wait until nothing is pending, at most `timeout` seconds. Return whether that was reached."""
        if self._url is None or self._pid != os.getpid():
            return True
        with self._wake:
            self._flushing = True
            self._wake.notify_all()
            try:
                return self._wake.wait_for(lambda: not self._queue and not self._in_flight, timeout)
            finally:
                self._flushing = False

    # The caller's side: it updates values under a lock that is never held during I/O.

    def _offer(
        self, phase: Phase, *, mark: int | None = None, metrics: Mapping[str, Any] | None = None, **f: Any
    ) -> None:
        if self._url is None:
            return
        try:
            if self._pid != os.getpid():
                # A fork copies neither the thread nor a usable lock, and pending reports belong to the parent.
                self._reset()
            with self._wake:
                if not self._started:
                    self._started = True
                    self._queue.append(_Pending(replace(self._known, phase=Phase.START, at=self._now())))
                    self._rouse()
                if phase is not Phase.START and self._record(phase, mark, metrics or {}, f):
                    self._rouse()
        except Exception as e:  # an error in a report must not stop training
            log.debug("report dropped: %s", e)

    def _record(self, phase: Phase, mark: int | None, metrics: Mapping[str, Any], fields: dict[str, Any]) -> bool:
        """Update the known values, and queue a report of them if this rank has to report them."""
        first = phase is Phase.TRAIN and not self._stepped
        # After a restore the next step ends a recovery, so it is reported at once.
        self._stepped = phase is Phase.TRAIN or (self._stepped and phase is not Phase.RESTORE)
        tick = time.monotonic()
        seconds = None
        if phase is Phase.TRAIN and self._mark is not None and fields["step"] > self._mark[0]:
            seconds = max(0.0, (tick - self._mark[1]) / (fields["step"] - self._mark[0]))
        if mark is not None:
            self._mark = (mark, tick)
        elif phase is Phase.TRAIN and self._mark is None:
            self._mark = (fields["step"], tick)
        # Each report contains the newest of all values, so one report is enough to know the state of the run.
        self._known = replace(self._known, phase=phase, at=self._now(), step_seconds=seconds, **fields)
        self._metrics = self._readable(metrics) or self._metrics
        pending = _Pending(self._known, self._metrics, steady=phase in (Phase.TRAIN, Phase.SAVE) and not first)
        # Events of one moment are not repeated, because a later report would seem to report new ones.
        self._known = replace(self._known, restored_step=None, restore_seconds=None, checkpoint_error=None)
        quiet = self._identity[0] != 0 and not first and phase in (Phase.TRAIN, Phase.SAVE, Phase.SAVE_SKIPPED)
        if quiet and not (phase is Phase.TRAIN and self.memory.grew(tick)):
            return False  # other ranks report only (re)starts, failures, the end, and growing memory
        if pending.steady and self._queue and self._queue[-1].steady:
            waiting = self._queue.pop().report
            if phase is Phase.SAVE and waiting.phase is Phase.TRAIN:
                # A job that commits at every step must still report its speed, so one report contains both.
                known = self._known
                pending.report = replace(
                    waiting, committed_step=known.committed_step, committed_at=known.committed_at, at=known.at
                )
        self._queue.append(pending)
        return True

    def _readable(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in list(metrics.items())[:MAX_METRICS]:
            device = getattr(value, "device", "cpu")
            if getattr(device, "type", device) == "cpu":
                # The tensor is detached, or else the pending report would keep the whole autograd graph alive.
                kept[str(name)[:MAX_METRIC_NAME]] = value.detach() if hasattr(value, "detach") else value
            else:
                self._say_once(
                    str(name), f"metric {name!r} is on {device} and not reported: reading it would wait for the device"
                )
        return kept

    def _rouse(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="everstep-report", daemon=True)
            self._thread.start()
        self._wake.notify_all()

    # The reporter's thread.

    def _run(self) -> None:
        backoff, earliest, unsteady = 0.0, 0.0, 0.0
        while True:
            with self._wake:
                while not self._due(earliest, unsteady):
                    self._wake.wait(self._until(earliest, unsteady))
                pending = self._queue.popleft()
                self._in_flight = True
                if pending.report.phase is Phase.TRAIN and pending.report.step is not None:
                    self._mark = (pending.report.step, time.monotonic())
            delivered = self._deliver(pending)
            tick = time.monotonic()
            with self._wake:
                self._in_flight = False
                if delivered:
                    backoff = 0.0
                else:
                    backoff = min(BACKOFF_MAX, backoff * 2 or BACKOFF_FIRST)
                    self._put_back(pending)
                unsteady = tick + backoff
                earliest = tick + max(MIN_INTERVAL, backoff)
                self._wake.notify_all()

    def _due(self, earliest: float, unsteady: float) -> bool:
        return bool(self._queue) and (self._until(earliest, unsteady) or 0.0) <= 0.0

    def _until(self, earliest: float, unsteady: float) -> float | None:
        """Seconds until the first report in the queue may be sent; None if there is nothing to send."""
        if not self._queue:
            return None
        at = earliest if self._queue[0].steady and not self._flushing else unsteady
        return max(0.0, at - time.monotonic())

    def _put_back(self, pending: _Pending) -> None:
        superseded = pending.steady and bool(self._queue)
        if not superseded and len(self._queue) < MAX_PENDING:
            self._queue.appendleft(pending)

    def _deliver(self, pending: _Pending) -> bool:
        """Whether this report is done: accepted, or refused for good."""
        assert self._url is not None
        try:
            peak = self.memory.read()
            with_peak = replace(pending.report, peak_memory=peak.host, peak_device_memory=peak.device)
            report = replace(with_peak, metrics=_floats(pending.metrics))
            post(self._url, self._token(), report.encode(), self._trust())
        except Refused as e:
            self._say_once(str(e), f"the operator refuses this process's reports, training goes on: {e}")
            return True
        except (PostError, OSError) as e:
            if not self._away:
                self._away = True
                log.warning("cannot report to the operator at %s, training goes on: %s", self._url, e)
            return False
        except Exception as e:
            self._say_once(type(e).__name__, f"report dropped, training goes on: {e}")
            return True
        if self._away:
            self._away = False
            log.info("reports reach the operator again")
        return True

    def _trust(self) -> ssl.SSLContext | None:
        """Made once: reading the image's own authorities takes milliseconds."""
        assert self._url is not None
        if self._context is None and self._url.startswith("https:"):
            self._context = ssl.create_default_context(cadata=self._ca or None)
        return self._context

    def _token(self) -> str | None:
        """The token, read each time, because the kubelet replaces a projected token before it expires."""
        if self._token_file is None:
            return None
        with open(self._token_file, encoding="ascii") as f:
            return f.read(16 * 1024).strip()

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._logged and len(self._logged) < 32:
            self._logged.add(key)
            log.warning("%s", text)


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            out[name] = float(value)
    return out


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return max(0, int(environ.get(name, "")))
    except ValueError:
        return default


_default: Reporter | None = None
_default_lock = threading.Lock()


def default_reporter() -> Reporter:
    """The reporter of this process, made from the environment at first use and flushed at exit (at most 2 s)."""
    global _default  # noqa: PLW0603  # one process, one voice
    with _default_lock:
        if _default is None:
            _default = Reporter.from_env()
            termination.install()
            atexit.register(_default.flush, FLUSH_SECONDS)
        return _default


def report(
    *,
    step: int,
    total_steps: int | None = None,
    epoch: int | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Tell the operator that `step` optimizer steps are complete; see `Reporter.step`. Never raises, never blocks."""
    default_reporter().step(step, total_steps=total_steps, epoch=epoch, metrics=metrics)
