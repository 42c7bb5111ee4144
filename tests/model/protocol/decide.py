"""What a writer decides. Stand-in of the worker's pure code until it is there."""
from __future__ import annotations
from protocol.log import NONE, Commit, Create, Decision, Done, Fenced, Open, Record, Rule


def decider(off: frozenset[Rule]):
    def decide(tail: tuple[Record | None, ...], record: Record, opened: int) -> Decision:
        opens = [r for r in tail if isinstance(r, Open)]
        if Rule.RECOGNISE_OWN not in off and record in tail:
            # An open counts only if nobody opened since: decided by the reader of the log at its first commit.
            return Done(tail.index(record))
        if isinstance(record, Commit):
            if opens and opens[-1].writer != record.writer:
                return Fenced(opens[-1].writer)
        elif Rule.ROUND_ORDER not in off and opens and max(o.round for o in opens) > record.round:
            return Fenced(opens[-1].writer)
        return Create(len(tail))
    return decide
