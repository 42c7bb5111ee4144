"""The names of objects below a checkpoint URL. Only this module builds them and takes them apart.

Pure. Invariant: a name that `owner_of` understands was built here, and clean-up touches no other.
"""

from __future__ import annotations

import re

import xxhash

LOG = "log/"
DATA = "data/"
PINS = "pins/"
LOADS = "loads/"
ALIVE = "alive/"
OPENS = "opens/"

PIN = "pin"
KEPT = "kept"
_TAG_IS = "tag-"

_RECORD = re.compile(r"log/(\d{12})\.json")
_SHARD = re.compile(r"data/([A-Za-z0-9][A-Za-z0-9._-]{0,127})/([A-Za-z0-9][A-Za-z0-9._-]{0,127})")
_OWN_SHARD = re.compile(r"data/(\d{12})-[0-9a-f]{8}-\d{8}/\d{5,}\.safetensors")
_DELETION = re.compile(r"data/[A-Za-z0-9][A-Za-z0-9._-]{0,127}/deleting-[0-9a-f]{16}\.json")
_HOLD = re.compile(
    r"pins/([A-Za-z0-9][A-Za-z0-9._-]{0,127})/[0-9a-f]{16}-(pin|kept|tag-[A-Za-z0-9][A-Za-z0-9._-]{0,63})\.json"
)
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOAD = re.compile(r"loads/(\d{12})/(\d{12})\.json")
_ALIVE = re.compile(r"alive/(\d{12})\.json")
_OPEN_COPY = re.compile(r"opens/(\d{12})-[0-9a-f]{16}\.json")
_SAVE_ID = re.compile(r"(\d{12})-[0-9a-f]{8}-(\d{8})")

MAX_RECORD_NUMBER = 10**12 - 1


def record_name(n: int) -> str:
    """The object that holds log record `n`."""
    return f"{LOG}{n:012d}.json"


def record_number(name: str) -> int | None:
    """The number of the log record with this name, or None for anything else."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match else None


def open_copy_name(n: int, writer: str) -> str:
    """The copy of open record `n` that `writer` makes before it creates the record: no other writer's has this name."""
    return f"{OPENS}{n:012d}-{xxhash.xxh3_64_hexdigest(writer.encode('utf-8', 'replace'))}.json"


def open_copy_number(name: str) -> int | None:
    """The open record in the name of a copy, or None for anything else."""
    match = _OPEN_COPY.fullmatch(name)
    return int(match[1]) if match else None


def save_id(open_n: int, writer: str, sequence: int) -> str:
    """The id of one attempt to save: no other attempt, of any writer, has the same.

    The open record's number is unique to a writer, the sequence to a save of that writer; the writer's first eight
    digits are for people. Every rank computes it without asking another.
    """
    return f"{open_n:012d}-{writer[:8]}-{sequence:08d}"


def owner_of(identifier: str) -> tuple[int, int] | None:
    """The open record's number and the sequence in a save id, or None if `save_id` did not make it."""
    match = _SAVE_ID.fullmatch(identifier)
    return (int(match[1]), int(match[2])) if match else None


def save_folder(identifier: str) -> str:
    """The folder of all objects of one save."""
    return f"{DATA}{identifier}/"


def shard_name(identifier: str, rank: int) -> str:
    """The shard that `rank` writes."""
    return f"{DATA}{identifier}/{rank:05d}.safetensors"


def shard_owner(name: str) -> int | None:
    """The open record whose writer alone writes the shard of this name, or None if it is no shard of `shard_name`."""
    match = _OWN_SHARD.fullmatch(name)
    return int(match[1]) if match else None


def part_name(identifier: str, rank: int) -> str:
    """The description of `rank`'s shard, from which the coordinator makes the manifest."""
    return f"{DATA}{identifier}/{rank:05d}.json"


def attachment_name(identifier: str, name: str) -> str:
    """A small object beside the shards of a save, which nobody needs to read them."""
    return f"{DATA}{identifier}/{name}.bin"


def metrics_name(identifier: str) -> str:
    """The metrics of a save that were known only after it."""
    return f"{DATA}{identifier}/metrics.json"


def folder_of(shard: str) -> str | None:
    """The save id in a shard's name, or None if the name is not one that a manifest may hold."""
    match = _SHARD.fullmatch(shard)
    return match[1] if match else None


def deletion_name(identifier: str, deleter: str) -> str:
    """The object that says that the deletion of this save has begun. `deleter`, 16 hex digits, is no other's: two that
    shared one would take it away from each other."""
    return f"{DATA}{identifier}/deleting-{deleter}.json"


def is_deletion(name: str) -> bool:
    """Whether an object of this name says that a deletion has begun."""
    return _DELETION.fullmatch(name) is not None


def withdrawal_name(deletion: str) -> str:
    """The object that says that the deletion whose object has this name was given up."""
    return deletion.replace("/deleting", "/withdrawn")


def holds_folder(identifier: str) -> str:
    """The folder of what keeps this save from being deleted: pins, tags, and the mark of retention."""
    return f"{PINS}{identifier}/"


def hold_name(identifier: str, what: str, holder: str) -> str:
    """An object that keeps this save from being deleted; `what` is `PIN`, `KEPT` or `tag_of` a name. `holder`, 16 hex
    digits, is no other's: who is refused takes away their own, and may not take another's with it."""
    return f"{holds_folder(identifier)}{holder}-{what}.json"


def tag_of(name: str) -> str:
    """What holds a save that has this name. Raises `ValueError` for a tag that no object may be called."""
    if not _TAG.fullmatch(name):
        raise ValueError(
            f"tag {name!r}: 1 to 64 letters, digits, '.', '_' and '-' are expected, a letter or digit first"
        )
    return f"{_TAG_IS}{name}"


def tag_in(what: str) -> str | None:
    """The name in what `tag_of` built, or None."""
    return what.removeprefix(_TAG_IS) if what.startswith(_TAG_IS) else None


def held_save(name: str) -> tuple[str, str] | None:
    """The save id that the object of this name keeps, and by what; or None."""
    match = _HOLD.fullmatch(name)
    return (match[1], match[2]) if match else None


def load_name(commit: int, open_n: int) -> str:
    """The object that says that the writer of open record `open_n` is loading commit `commit`."""
    return f"{LOADS}{commit:012d}/{open_n:012d}.json"


def load_numbers(name: str) -> tuple[int, int] | None:
    """The commit and the open record in the name of a load mark, or None for anything else."""
    match = _LOAD.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def alive_name(open_n: int) -> str:
    """The object that the writer of open record `open_n` writes anew while it lives."""
    return f"{ALIVE}{open_n:012d}.json"


def alive_number(name: str) -> int | None:
    """The open record in the name of a sign of life, or None for anything else."""
    match = _ALIVE.fullmatch(name)
    return int(match[1]) if match else None
