"""What the operator says when it does not do what was asked, and how to tell that from what others say.

Between a worker and the operator stand proxies, a Service whose rules are old for a moment, and addresses that belonged
to another pod. So a status alone says nothing: a refusal is the operator's only if its body is. What is not the
operator's is an outage, which ends by itself; it never ends a worker.
"""

from __future__ import annotations

import json

# 401: the token; 403: this pod may not; 400 and 413: what was sent can never be taken.
REFUSALS = frozenset({400, 401, 403, 413})
MAX_WORDS = 300  # characters


def words(body: bytes) -> str | None:
    """The operator's reason: a JSON object with `reason` and nothing else. None: another wrote this."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or list(found) != ["reason"] or not isinstance(found["reason"], str):
        return None
    return found["reason"][:MAX_WORDS]


def is_refusal(status: int, body: bytes) -> bool:
    """Whether the operator itself refuses, so that asking again cannot help."""
    return status in REFUSALS and words(body) is not None
