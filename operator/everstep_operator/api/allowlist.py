"""Decides whether this installation allows a checkpoint URL, by the same rules as the chart's policy.

The policy refuses such a job at the API server. This module is for jobs that were stored before the policy existed.
Pure. Invariant: a URL is judged as written, so anything that a client library would decode or normalise is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

NAMESPACE = "{namespace}"
_REWRITTEN = re.compile(r"[%?#\\]|\.\.")


def checkpoint_url_refusal(url: str, namespace: str, prefixes: Sequence[str]) -> str | None:
    """Why a job in `namespace` may not write to `url`; None if it may. `{namespace}` in a prefix stands for the
    namespace."""
    allowed = [prefix.replace(NAMESPACE, namespace) for prefix in prefixes]
    rests = [url.removeprefix(prefix) for prefix in allowed if url.startswith(prefix)]
    if not rests:
        return f"spec.checkpoint.url must begin with one of {', '.join(allowed)}"
    if _REWRITTEN.search(url):
        return "spec.checkpoint.url must not contain '..', '%', '?', '#' or a backslash"
    if all("@" in rest for rest in rests):
        return "spec.checkpoint.url must not contain '@': credentials belong in spec.checkpoint.secretRef"
    host = url.partition("://")[2].partition("/")[0].lower()
    if host.startswith("[") or _is_address(host.partition(":")[0]):
        return "spec.checkpoint.url must not name an IP address as its host or bucket"
    return None


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
