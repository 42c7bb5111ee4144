"""The rules of the protocol, by the names that the tests, the traces and docs/adr/0001 use."""

from __future__ import annotations

from enum import StrEnum


class ClusterRule(StrEnum):
    CAS_ON_PUBLISH = "the round is published by compare-and-swap on the job's resourceVersion"
    PUBLISH_FIRST = "a round is published before its pods are created"
    NAME_FROM_ROUND = "a pod's name follows from the published round, not from the pods that happen to be seen"
    OWNER_CHECK = "AlreadyExists is followed by a check of the owner's UID"
    UID_PRECONDITION = "a delete carries the UID of the pod that was judged"
    DELETE_ONLY_OLDER = "only pods of rounds below the known published one are left-overs"


class LogRule(StrEnum):
    CONDITIONAL_CREATE = "a record is created only where there is none"
    OPEN_BEFORE_RESTORE = "a writer opens before it chooses the commit to restore"
    ROUND_ORDER = "an open of a round below the one that its job opened with is refused"
    JOB_ORDER = "a job that another job took the log from never opens it again"
    JOB_AGE = "a job opens the log only if no job that was created later has opened it"
    NEWER_OPEN_FENCES = "whoever meets another's newer open stops for ever"
    READ_WHAT_WON = "after a conflict the record that won is read before another number is tried"
    RECOGNISE_OWN = "an identical record of one's own is the answer to a lost response"
    SHARDS_FIRST = "a commit is sent when its shards are durable"
    UNIQUE_SAVES = "every save has an id of its own; shards are immutable"
    PROBE_PAST_LISTING = "the tail is the greatest listed number, then probed until absent"
    VERIFY_SHARDS = "a commit whose shards do not verify is stepped over"
    UNREADABLE_IS_NOT_DAMAGED = "a read that fails is tried again, it does not make a commit invalid"
    KEEP_UNANSWERED = "shards of a commit whose outcome is unknown are kept"
    CLEAN_ONLY_OLDER = "left-over shards of newer opens and of saves that may be in flight are kept"
    CLEAN_WHILE_OWNER = "a writer that another has taken the log from deletes nothing"
    CLEAR_WHAT_IS_IN_NO_RECORD = "before its first commit a writer deletes only saves of earlier opens in no record"
    SPARE_WHAT_IS_UNKNOWN = "before its first commit a writer keeps the saves that a damaged record may name"
    COPY_BEFORE_OPEN = "a copy of an open record is written before it, so that a damaged one has an owner"
    UNKNOWN_OWNER_STOPS = "nobody takes the log over a damaged record that might be another's open"
    COMPACT_IN_PLACE = "compaction replaces a record by a short one of the same number; it never deletes one"
    COMPACT_WHAT_IS_GONE = "only a commit whose shards are deleted is compacted"


class WorldRule(StrEnum):
    CLAIM_THE_PRESENT_ROUND = "a world claims the round that it is in, whatever its processes were started in"
    COMPARE_UNDER_OWN_OPEN = "a world that goes on from memory commits nothing behind the newest commit below its open"
    RENDEZVOUS_OWNS = "where no operator counts rounds, the rendezvous is the owner whose rounds have an order"
    NEW_RENDEZVOUS_NEW_OWNER = "a rendezvous that lost what it held is another one"


class SuccessionRule(StrEnum):
    MAJORITY_ALONE = "a majority of a round's members that does not reach the store forms the next round"
    STORE_NEEDS_MAJORITY = "the store forms the next round only with a majority of the last one"
    STORE_WAITS_FOR_TERM = "for a term after the last answer the store gives nobody's place away, and members may form"
