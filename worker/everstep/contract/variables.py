"""Which EVERSTEP_* variables there are. One that nobody reads is a mistake in writing, and is named.

Pure. Invariant: the values of variables are never looked at; they may hold secrets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from everstep.contract import env

PREFIX = "EVERSTEP_"
# What Kubernetes sets in each container of a namespace that has a Service of a name like "everstep" or "everstep-x".
_SERVICE_LINK = re.compile(
    r"EVERSTEP(_[A-Z0-9_]+)?_(SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
# Read by one part of the library or the agent, and set by users alone.
KNOWN = frozenset(
    {value for name, value in vars(env).items() if name.isupper() and isinstance(value, str)}
    | {
        "EVERSTEP_CHECKPOINT_MAX_LOADS",
        "EVERSTEP_CHECKPOINT_NONFINITE",
        "EVERSTEP_LOCAL_POD",
        "EVERSTEP_LOG_LEVEL",
        "EVERSTEP_PRELOAD",
        "EVERSTEP_SINGLE_COMMITTER",
    }
)


def unknown(environ: Mapping[str, str], known: Iterable[str] = KNOWN) -> list[str]:
    """One sentence for each variable that begins with EVERSTEP_ and is not `known`, with the nearest one that is."""
    names = {name.removeprefix(PREFIX) for name in known}
    sentences = []
    for name in sorted(environ):
        rest = name.removeprefix(PREFIX)
        if rest == name or rest in names or _SERVICE_LINK.fullmatch(name):
            continue
        near = difflib.get_close_matches(rest, sorted(names), n=1)
        meant = f"; is {PREFIX}{near[0]} meant?" if near else ""
        sentences.append(f"{name}: no such variable, so it changes nothing{meant}")
    return sentences
