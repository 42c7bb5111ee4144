"""Errors of the checkpoint package. Storage errors keep their own types: retryable and terminal are decided there."""

from __future__ import annotations

from everstep.contract import exit_codes
from everstep.contract.refusal import Refusal


class CheckpointError(Exception):
    """Base of every error that the checkpoint engine raises itself."""


class FormatError(CheckpointError):
    """Bytes are not what the commit format says: damaged, forged or cut. The text names the object and the field."""


class SettingUnusable(Refusal, CheckpointError):
    """An argument, a variable of the environment, or the order of calls is none that works. The text says what does."""


class UnsupportedVersion(Refusal, CheckpointError):
    """A record of a newer format. Nobody may train past what they cannot read: use a newer everstep."""


class Damaged(CheckpointError):
    """A shard is missing, has the wrong size or fails its checksum. The text names the file."""


class NoCommit(CheckpointError):
    """There is no such commit: none at all, none of the given step, or none with the given number."""


class StateMismatch(Refusal, CheckpointError):
    """The state passed in does not fit the commit, or holds a value that no checkpoint can hold."""


class NewerCommit(CheckpointError):
    """The newest commit is of a later step than the state to be saved: members of an older round went on and committed.

    Nothing is saved; `restore` brings that commit. Raised on all ranks, and only in a session whose world has changed.
    """


class SaveFailed(CheckpointError):
    """A save failed. Training goes on; the previous commit is still the latest."""


class OwnerUnknown(CheckpointError):
    """Nobody can tell who owns the log: a damaged record might be the open record of a newer run. Nothing was written.

    The text names the record. Go on from the commits under another URL, which `everstep ckpt restore` fills. To start
    again under this URL cannot help, so a script that lets it propagate should exit with `exit_code`.
    """

    exit_code = exit_codes.STORE_UNUSABLE


class Occupied(CheckpointError):
    """Another run, of another job, has the log and is alive: nothing was written. The text names it.

    Give this run another URL, or end that one and start again.
    """


class Fenced(CheckpointError):
    """A newer open record owns the training state: this process must stop, and never write again.

    A script that lets it propagate should exit with `exit_code`, which the operator does not charge to the budget.
    """

    exit_code = exit_codes.FENCED
