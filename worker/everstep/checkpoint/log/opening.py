"""How a Checkpointer begins: settings, the store behind its retries, the hook, and rank 0 taking the log for all.

Invariant: what makes rank 0 fail here makes every rank fail with the same error; nobody waits in a collective for a
rank that has gone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from everstep.checkpoint.errors import (
    CheckpointError,
    Fenced,
    Occupied,
    OwnerUnknown,
    SettingUnusable,
    UnsupportedVersion,
)
from everstep.checkpoint.format.layout import record_name
from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, decode_record, encode_record, stamp
from everstep.checkpoint.handle import Events
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.log import decisions as rules
from everstep.checkpoint.log.alive import Sign, wait_for_owner
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Claim
from everstep.checkpoint.ranks import Ranks, join
from everstep.checkpoint.state.finite import Nonfinite
from everstep.contract import env, variables
from everstep.storage import (
    NotFound,
    ObjectStore,
    RetryableError,
    RetryingStore,
    StorageError,
    StoreUnusable,
    open_store,
    probe,
)

# --- shared
# Checks that all ranks see one folder: a path on each node's own disk looks the same on all of them. Without this check
# each rank would write its part where nobody else sees it, and the first save would fail after `peer_timeout` seconds.
# Invariant: every rank gets the same answer, so that no rank waits in a collective for one that has left.

# One client of a network file system may see late what another one wrote. NFS asks the server at the first look-up.
PATIENCE: Final = 10.0
_PAUSE: Final = 0.1


def check_shared(store: ObjectStore, own: OpenRecord, ranks: Ranks) -> None:
    """Check that every rank sees the record `own`, which rank 0 has just created. Collective.

    Only folders and memory are checked: a bucket's name means the same bucket everywhere. Raises `StoreUnusable` on
    every rank if one does not see the record within `PATIENCE` seconds.
    """
    if ranks.world_size == 1:
        return
    blind = -1 if _sees(store, own) else ranks.rank
    blind_rank = ranks.maximum(blind)
    if blind_rank < 0:
        return
    where = f" (on {socket.gethostname()})" if blind_rank == ranks.rank else ""
    raise StoreUnusable(
        f"{store.url}: rank {blind_rank}{where} does not see there what rank 0 has written: this place is not shared "
        "between them. All ranks need one folder that every node mounts (NFS and the like), or an object store's URL"
    )


def _sees(store: ObjectStore, own: OpenRecord) -> bool:
    if not store.url.startswith(("file:", "memory:")):
        return True
    wanted, deadline = encode_record(own), time.monotonic() + PATIENCE
    while True:
        try:
            # The bytes, too: a folder of the node's own may hold another log, with a record of this number.
            if store.get(record_name(own.n)) == wanted:
                return True
        except NotFound:
            pass
        except RetryableError:
            return True  # the store does not answer, so nothing is known; the first save will show it
        except StorageError:
            return False  # this rank may not read the record
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)


# --- owner
# How this process owns the log: in which world and round it took the log, and which commit was the newest then.
# Invariant: the log is taken once for a world, by rank 0 for all of its ranks, before any of them saves.


class Owner:
    """`world_arguments`: the process group, rank and world size that the script passed. `probe`: whether the store was
    opened from a URL; such a store is tried out first, and gets a sign of life."""

    def __init__(
        self, store: ObjectStore, log: CommitLog, settings: Settings,
        world_arguments: tuple[Any, int | None, int | None], probe: bool, events: Events,
    ) -> None:  # fmt: skip
        self._store, self._log, self._settings, self._events = store, log, settings, events
        self._world_arguments, self._probe = world_arguments, probe
        self.ranks: Ranks | None = None
        self.record: OpenRecord | None = None
        self.newest = -1  # the step of the newest commit when the log was taken; -1 once the state is that or later
        self.round: InRound | None = None  # the round after `move`; before, the environment has it
        self._sign: Sign | None = None  # on rank 0 only
        self._begins = True  # until this process has taken the log once

    def take(self, restores: bool = False) -> tuple[OpenRecord, Ranks]:
        """Rank 0 takes the log, once; every rank gets its open record. Collective.

        Only a process that begins checks whether another run is alive on the URL. A world that goes on from memory
        after it lost its rendezvous may find a member there that it has left out, and takes the log rightly.
        """
        if self.ranks is None:
            self.ranks = join(*self._world_arguments)
        ranks = self.ranks
        if self.record is None:
            round_ = self.round or InRound.of(os.environ)
            claim = claim_of(uuid.uuid4().hex, round_, ranks.world_size, stamp(time.time()), os.environ)
            probed = self._store if self._probe else None
            begins = self._begins and (restores or self.round is None)
            try:
                own, self.newest = open_together(self._log, probed, self._settings, claim, ranks, begins)
                check_shared(self._store, own, ranks)
                self.record, self._begins = own, False
            except (Fenced, Occupied, OwnerUnknown, StoreUnusable) as e:
                # Each of these ends the process, but for an unusable store where a world goes on from memory: that
                # costs a save. The event shows the reason beside the exit code.
                if restores or self.round is None or not isinstance(e, StoreUnusable):
                    self._events("fenced" if isinstance(e, Fenced) else "unusable", error=e)
                raise
            if ranks.rank == 0 and probed is not None:
                self._sign = Sign(self._store, self.record)
                weakref.finalize(self, self._sign.stop.set)
            self._events("opened", n=self.record.n, round=self.record.round, writer=self.record.writer)
        return self.record, ranks

    def move(self, ranks: Ranks, round_: InRound) -> None:
        """Forget that the log was taken: the next `take` is in another world."""
        self.round, self.ranks, self.record, self.newest = round_, ranks, None, -1

    def end_sign(self, timeout: float = 0.0) -> None:
        if self._sign is not None:
            self._sign.end(timeout)
            self._sign = None


# --- opening

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


_compared = set[str]()  # values of EVERSTEP_CHECKPOINT_URL that a process has used, or has warned of


def compare_url(url: str | None, environ: Mapping[str, str]) -> None:
    """Warn, on rank 0, if the first URL that the script names is another one than the environment's, which a job or
    `everstep run --checkpoint` has set; not if it is a default. A script that has saved where the environment says may
    name others beside."""
    wanted = environ.get(env.CHECKPOINT_URL, "")
    if not wanted or wanted in _compared or environ.get(env.CHECKPOINT_DEFAULT) == "1":
        return
    _compared.add(wanted)
    if url and _absolute(url) != _absolute(wanted) and environ.get("RANK", "0") == "0":
        log.warning(
            "the script names the checkpoint URL %s, and that counts. %s=%s, which the job's spec.checkpoint.url or "
            "everstep run --checkpoint has set, is not used: nothing is restored from it or saved there. To use it, "
            "name no URL in the script: everstep.start(), Checkpointer()", url, env.CHECKPOINT_URL, wanted,
        )  # fmt: skip


def _absolute(url: str) -> str:
    """A folder is written as a path, in any form, or as file://."""
    path = url.removeprefix("file://")
    return url.rstrip("/") if "://" in path else os.path.realpath(path)


def text_of(url: str | os.PathLike[str] | None) -> str | None:
    """A URL or folder as a text. Raises `SettingUnusable` for anything else."""
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if text is not None and not isinstance(text, str):
        raise SettingUnusable(f"url={text!r}: a text is expected, such as s3://bucket/run or a folder")
    return text


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
    on_preemption: bool

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
        on_preemption: bool | None = None,
    ) -> Settings:
        """Raises `SettingUnusable` naming the argument or variable that is wrong."""
        url = text_of(url)
        compare_url(url, environ)
        # With an agent, the agent has logged this already; of many processes one logs it.
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
            single_committer = _flag(environ, SINGLE_COMMITTER)
        if on_preemption is None:
            on_preemption = _flag(environ, env.CHECKPOINT_ON_PREEMPTION)
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
            max_loads, cast(Nonfinite, policy), on_preemption,
        )  # fmt: skip


def _flag(environ: Mapping[str, str], name: str) -> bool:
    flag = environ.get(name, "").lower()
    if flag not in ("", "0", "false", "1", "true"):
        raise SettingUnusable(f"{name}={flag}: 1 or 0 is expected")
    return flag in ("1", "true")


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
        """The round in the environment that the launcher made for this process; 0 if the launcher has no rounds."""
        text = environ.get(env.ROUND, "")
        number = int(text) if text.isdecimal() and len(text) < 17 else 0
        return cls(number, environ.get(env.RENDEZVOUS, ""))


def claim_of(writer: str, round_: InRound, world_size: int, at: str, environ: Mapping[str, str]) -> Claim:
    """The claim of a world in this round, for the job that the operator says it is of."""
    created = _number(environ, env.JOB_CREATED, whole=True)
    uid = environ.get(env.JOB_UID, "")
    return Claim(writer, round_.number, uid, world_size, at, int(created or 0), round_.rendezvous)


def open_together(
    log_: CommitLog, probed: ObjectStore | None, settings: Settings, wanted: Claim, ranks: Ranks, begins: bool = False
) -> tuple[OpenRecord, int]:
    """Rank 0 probes the store, looks for another live run there if this one `begins`, and opens the log. All ranks get
    the open record and the step of the newest commit below it (-1 without one), or rank 0's error."""
    answer = b""
    cause: Exception | None = None
    if ranks.rank == 0:
        try:
            if probed is not None and not settings.single_committer:
                probe(probed)
            # A process that torchrun starts again replaces one that torchrun has ended or cannot reach.
            if probed is not None and begins and os.environ.get(_RESTARTS, "0") in ("", "0"):
                wait_for_owner(probed, lambda: _owner_to_replace(log_, wanted), wanted)
            record = log_.open(wanted)
            newest = log_.read(record.commit) if record.commit != NONE else None
            step = newest.step if isinstance(newest, CommitRecord) else -1
            answer = json.dumps({"n": record.n, "newest": step}).encode() + b"\n" + encode_record(record)
        except Exception as e:  # sent to all ranks, then raised on all of them
            cause = e
            answer = json.dumps({"error": _name(e), "text": str(e)}).encode() + b"\n"
    head, _, body = ranks.from_first(answer).partition(b"\n")
    header = json.loads(head)
    if "error" in header:
        raise cause or _ERRORS[header["error"]](header["text"])
    opened = decode_record(body, header["n"], "rank 0's open record")
    assert isinstance(opened, OpenRecord)
    return opened, int(header["newest"])


def _owner_to_replace(log_: CommitLog, wanted: Claim) -> OpenRecord | None:
    """The newest open record, if the rules allow the claim to take the log from its owner."""
    head = log_.head()
    return None if isinstance(rules.decide_open(head, wanted), rules.Refuse) else head.open


def quiet(hook: Events) -> Events:
    """The hook, with its errors logged instead of raised: a hook must not make a save fail."""

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
