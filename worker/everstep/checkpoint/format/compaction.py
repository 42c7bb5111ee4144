"""A log record that keeps its place and loses its body: what bounds the bytes of the log.

A commit record grows with the state: one entry a piece. Once the shards of a commit are deleted nothing can be read by
that description, but the record's place still matters: records are created at last + 1, so a number that became free
could be taken again by a writer that slept, behind the back of everybody else (docs/adr/0019). So compaction deletes
no record. It replaces a record by a short one with the same number, links and writer.

Pure. Invariant: every decision of `log` about a compacted record is the one about the record that it was; and readers
of any release see a commit whose shard is missing, never an empty state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from everstep.checkpoint.format.layout import shard_name
from everstep.checkpoint.format.manifest import CHUNK_BYTES, CommitRecord, Record, Shard

# A compacted record is smaller than this (its texts are ids and a time): what is larger may be worth a look.
SMALL_BYTES: Final = 1024

_SUM_OF_NOTHING: Final = "99aa06d3014798d86001c324468d497f"  # XXH3 128 of no bytes


def compacted(record: CommitRecord) -> CommitRecord:
    """The record without the description of its state. It names one shard, of no bytes, which never exists: a file of
    tensors has a header."""
    nothing = Shard(shard_name(record.save_id, 0), 0, CHUNK_BYTES, (_SUM_OF_NOTHING,))
    return replace(record, shards=(nothing,), entries=(), values={})


def is_compacted(record: Record) -> bool:
    """Whether the record says no more than that there was a commit."""
    return isinstance(record, CommitRecord) and [s.bytes for s in record.shards] == [0] and not record.entries
