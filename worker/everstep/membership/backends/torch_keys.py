"""Translates torch's own keys of `--rdzv-conf` into ours. Pure.

A command line that was written for torch's `c10d` or `etcd` rendezvous runs here unchanged. Invariant: each of torch's
keys is obeyed, or reported as one that changes nothing. A key that is neither torch's nor ours is left for the caller
to refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Of torch 2.13: dynamic_rendezvous, c10d_rendezvous_backend, etcd_rendezvous_backend, etcd_rendezvous, static.
_SAME = {
    "join_timeout": "timeout",
    "last_call_timeout": "last_call",
    "ssl_cert": "cert_file",
    "ssl_cert_key": "key_file",
    "ca_cert": "ca_file",
    "cert": "cert_file",
    "key": "key_file",
    "cacert": "ca_file",
    "etcd_prefix": "prefix",
}
_INTERVAL, _ATTEMPTS = "keep_alive_interval", "keep_alive_max_attempt"
_DEFAULTS = {_INTERVAL: "5", _ATTEMPTS: "3"}  # torch's
_MEANINGLESS = {
    "heartbeat_timeout": "calls of the round store have bounds of their own",
    "read_timeout": "calls of the round store have bounds of their own",
    "is_host": "no agent hosts the rendezvous",
    "store_type": "no agent hosts the rendezvous",
    "rank": "ranks are agreed on",
}
KEYS = (*_SAME, *_DEFAULTS, *_MEANINGLESS)


class Clash(ValueError):
    """Two keys mean the same; the message names both."""


@dataclass(frozen=True, slots=True)
class Translated:
    """`values`: by our keys. `given`: by our key, the key on the command line, if that is another one. `unused`: by
    key, why it changes nothing."""

    values: Mapping[str, Any]
    given: Mapping[str, str]
    unused: Mapping[str, str]


def translated(config: Mapping[str, Any], ours: Collection[str]) -> Translated:
    """`config` with torch's keys replaced by those of `ours` that mean the same. Raises Clash."""
    values = {key: value for key, value in config.items() if key in ours or key not in KEYS}
    given: dict[str, str] = {}
    unused = {key: why for key, why in _MEANINGLESS.items() if key in config and key not in ours}
    for key, name in _SAME.items():
        if key not in config or key in ours:
            continue
        if name not in ours:
            unused[key] = "it is for another backend"
        else:
            _put(values, given, name, key, config[key])
    alive = [key for key in _DEFAULTS if key in config]
    if alive:
        # torch gives an agent up after `attempts` missed renewals.
        interval, attempts = ({**_DEFAULTS, **config}[key] for key in _DEFAULTS)
        _put(values, given, "ttl", "*".join(alive), _product(interval, attempts))
    return Translated(values, given, unused)


def _put(values: dict[str, Any], given: dict[str, str], name: str, key: str, value: Any) -> None:
    # torchrun itself always gives a timeout, even if the user gave none, so a second one is no clash.
    if (name in values and name != "timeout") or name in given:
        raise Clash(f"{given.get(name, name)} and {key} mean the same: give one")
    values[name], given[name] = value, key


def _product(interval: object, attempts: object) -> str:
    try:
        return f"{float(str(interval)) * float(str(attempts)):g}"
    except ValueError:
        return f"{interval}*{attempts}"  # not a number, so the caller refuses it
