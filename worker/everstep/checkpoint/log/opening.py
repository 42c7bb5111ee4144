"""How a Checkpointer begins: settings, the store behind its retries, the hook, and rank 0 taking the log for all.

Invariant: what makes rank 0 fail here makes every rank fail with the same error; nobody waits in a collective for a
rank that has gone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from everstep.checkpoint.errors import (
    CheckpointError,
    Fenced,
    Occupied,
    OwnerUnknown,
    SettingUnusable,
    UnsupportedVersion,
)
from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, decode_record, encode_record
from everstep.checkpoint.handle import Events
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.log import decisions as rules
from everstep.checkpoint.log.alive import wait_for_owner
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Claim
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.state.finite import Nonfinite
from everstep.contract import env, variables
from everstep.storage import ObjectStore, RetryableError, RetryingStore, StoreUnusable, open_store, probe

log = logging.getLogger("everstep.checkpoint")

SINGLE_COMMITTER = "EVERSTEP_SINGLE_COMMITTER"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # of the launcher that started this process
MAX_LOADS = "EVERSTEP_CHECKPOINT_MAX_LOADS"
NONFINITE = "EVERSTEP_CHECKPOINT_NONFINITE"
DEFAULT_KEEP = 3
DEFAULT_LOADS = 3
DEFAULT_SECONDS = 60.0

_ERRORS: dict[str, type[Exception]] = {
    e.__name__: e
    for e in (
        Fenced,
        Occupied,
        OwnerUnknown,
        StoreUnusable,
        RetryableError,
        UnsupportedVersion,
        CheckpointError,
    )
}


def text_of(url: str | os.PathLike[str] | None) -> str | None:
    """A URL or folder as the stores take it. Raises `SettingUnusable` for what is neither."""
    found = os.fspath(url) if isinstance(url, os.PathLike) else url
    if found is not None and not isinstance(found, str):
        raise SettingUnusable(f"url={found!r}: a text is expected, such as s3://bucket/run or a folder")
    return found


@dataclass(frozen=True, slots=True)
class Settings:
    """The requested settings: from the arguments first, then from the environment, then defaults."""

    url: str
    keep: Keep
    every_seconds: float | None
    every_steps: int | None
    single_committer: bool
    max_loads: int
    nonfinite: Nonfinite

    @classmethod
    def resolve(
        cls,
        environ: Mapping[str, str],
        url: str | os.PathLike[str] | None,
        keep: int | Keep | None,
        every_seconds: float | None,
        every_steps: int | None,
        single_committer: bool | None,
        max_loads: int | None,
        nonfinite: str | None,
    ) -> Settings:
        """Raises `SettingUnusable` naming the argument or variable that is wrong."""
        url = text_of(url)
        # An agent has said it already, and of many processes one is enough.
        if env.AGENT_SOCKET not in environ and environ.get("RANK", "0") == "0":
            for text in variables.unknown(environ):
                log.warning("%s", text)
        if every_seconds is None and every_steps is None:
            every_seconds = _number(environ, env.CHECKPOINT_EVERY_SECONDS)
            steps = _number(environ, env.CHECKPOINT_EVERY_STEPS, low=1, whole=True)
            every_steps = int(steps) if steps is not None else None
        if every_seconds is None and every_steps is None:
            every_seconds = DEFAULT_SECONDS
        last = keep.last if isinstance(keep, Keep) else keep
        if last is None:
            last = int(_number(environ, env.CHECKPOINT_KEEP, low=1, whole=True) or DEFAULT_KEEP)
        for name, value in (("keep", last), ("every_steps", every_steps), ("every_seconds", every_seconds)):
            if value is not None and (not isinstance(value, int | float) or not 0 < value < 1e9):
                raise SettingUnusable(f"{name}={value!r}: a positive number is expected")
        rules = keep if isinstance(keep, Keep) else _rules(environ, int(last))
        if single_committer is None:
            said = environ.get(SINGLE_COMMITTER, "").lower()
            if said not in ("", "0", "false", "1", "true"):
                raise SettingUnusable(f"{SINGLE_COMMITTER}={said}: 1 or 0 is expected")
            single_committer = said in ("1", "true")
        if max_loads is None:
            given = _number(environ, MAX_LOADS, whole=True)
            max_loads = DEFAULT_LOADS if given is None else int(given)
        if max_loads < 0:
            raise SettingUnusable(f"max_loads={max_loads}: 0 (never step over) or a positive number is expected")
        policy = nonfinite or environ.get(NONFINITE, "") or "refuse"
        if policy not in ("refuse", "mark", "allow"):
            raise SettingUnusable(f"nonfinite={policy!r}: one of 'refuse', 'mark' and 'allow' is expected")
        return cls(
            url or environ.get(env.CHECKPOINT_URL, ""), rules, every_seconds, every_steps, single_committer,
            max_loads, cast(Nonfinite, policy),
        )  # fmt: skip


def _rules(environ: Mapping[str, str], last: int) -> Keep:
    """The rules for commits to keep, from `last` and the environment variables."""
    steps, hours = (
        _number(environ, name) for name in (env.CHECKPOINT_KEEP_EVERY_STEPS, env.CHECKPOINT_KEEP_EVERY_HOURS)
    )
    if steps is not None and not steps.is_integer():
        raise SettingUnusable(f"{env.CHECKPOINT_KEEP_EVERY_STEPS}={steps}: a whole number of steps is expected")
    return Keep(last, None if steps is None else int(steps), hours)


def connect(settings: Settings, options: Mapping[str, Any] | None) -> ObjectStore:
    """The store of the settings' URL, with retries. Raises `StoreUnusable`."""
    return RetryingStore(open_store(settings.url, options, single_committer=settings.single_committer))


@dataclass(frozen=True, slots=True)
class InRound:
    """The round that a world is in: its number, and the rendezvous that counts it (see `log.Claim`)."""

    number: int
    rendezvous: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> InRound:
        """As the launcher said when it started this process; round 0 without one that knows rounds."""
        told = environ.get(env.ROUND, "")
        number = int(told) if told.isdecimal() and len(told) < 17 else 0
        return cls(number, environ.get(env.RENDEZVOUS, ""))


def claim(writer: str, round_: InRound, world_size: int, at: str, environ: Mapping[str, str]) -> Claim:
    """The claim of a world in this round, for the job that the operator says it is of."""
    created = _number(environ, env.JOB_CREATED, whole=True)
    uid = environ.get(env.JOB_UID, "")
    return Claim(writer, round_.number, uid, world_size, at, int(created or 0), round_.rendezvous)


def open_together(
    log_: CommitLog, probed: ObjectStore | None, settings: Settings, wanted: Claim, ranks: Ranks, begins: bool = False
) -> tuple[OpenRecord, int]:
    """Rank 0 probes the store, looks for another run there if this one `begins`, and opens the log; all get its record
    and the step of the newest commit below it (-1 without one), or rank 0's error."""
    answer = b""
    cause: Exception | None = None
    if ranks.rank == 0:
        try:
            if probed is not None and not settings.single_committer:
                probe(probed)
            # A process that torchrun starts again replaces one that torchrun has ended or cannot reach.
            if probed is not None and begins and os.environ.get(_RESTARTS, "0") in ("", "0"):
                wait_for_owner(probed, lambda: _to_ask(log_, wanted), wanted)
            record = log_.open(wanted)
            newest = log_.read(record.commit) if record.commit != NONE else None
            step = newest.step if isinstance(newest, CommitRecord) else -1
            answer = json.dumps({"n": record.n, "newest": step}).encode() + b"\n" + encode_record(record)
        except Exception as e:  # told to all ranks, then raised on all of them
            cause = e
            answer = json.dumps({"error": _name(e), "text": str(e)}).encode() + b"\n"
    head, _, body = ranks.from_first(answer).partition(b"\n")
    told = json.loads(head)
    if "error" in told:
        raise cause or _ERRORS[told["error"]](told["text"])
    found = decode_record(body, told["n"], "rank 0's open record")
    assert isinstance(found, OpenRecord)
    return found, int(told["newest"])


def _to_ask(log_: CommitLog, wanted: Claim) -> OpenRecord | None:
    """The newest open record, if the claim may take the log from it at all."""
    head = log_.head()
    return None if isinstance(rules.decide_open(head, wanted), rules.Refuse) else head.open


def quiet(hook: Events) -> Events:
    """The hook, with its errors logged: what listens must not be able to fail a save."""

    def call(kind: str, **fields: Any) -> None:
        try:
            hook(kind, **fields)
        except Exception:
            log.exception("on_event(%r) failed", kind)

    return call


def default_events() -> Events:
    """Progress reports to the operator; nothing outside a TrainingJob."""
    from everstep.reporting.report import default_reporter  # noqa: PLC0415  the engine works without the session layer

    return default_reporter().on_event


def _name(e: Exception) -> str:
    return next((name for name, kind in _ERRORS.items() if isinstance(e, kind)), "CheckpointError")


def _number(environ: Mapping[str, str], name: str, *, low: float = 0.0, whole: bool = False) -> float | None:
    try:
        return env.number(environ, name, low=low, high=1e12, whole=whole)
    except env.BadVariable as e:
        raise SettingUnusable(str(e)) from e
