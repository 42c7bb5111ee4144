"""Reads and checks the keys of `--rdzv-conf`, and refuses unknown ones by name.

It knows nothing of torch but the names of torch's keys (`torch_keys`). torchrun gives values as strings, and always
adds `timeout`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.contract import env
from everstep.contract.document import MAX_MEMBERS
from everstep.contract.messages import REPORT_PATH
from everstep.membership.backends.etcd import PREFIX
from everstep.membership.backends.etcd_http import Access, Gateway, endpoints
from everstep.membership.backends.operator_calls import OperatorCalls, base_url
from everstep.membership.errors import RendezvousFailed
from everstep.membership.joining import JoinSettings
from everstep.membership.proposals import Patience

# --- torch keys
# Translates torch's own keys of `--rdzv-conf` into ours. A command line that was written for torch's `c10d` or `etcd`
# rendezvous runs here unchanged. Invariant: each of torch's keys is obeyed, or reported as one that changes nothing. A
# key that is neither torch's nor ours is left for the caller to refuse.

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


# --- configuration

log = logging.getLogger(__name__)

FIRST_CALL = 30.0  # seconds; torch's default is the same
LATER_CALL = 5.0


class ConfigurationInvalid(RendezvousFailed, ValueError):
    """A key or value of `--rdzv-conf`, or the endpoint, is invalid; the message names it."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Every field but `urls` and `ca` is a key of `--rdzv-conf`, for one backend or both. `ca`: PEM of the authorities
    by which the operator is verified, from the pod's environment."""

    urls: tuple[str, ...]
    timeout: float = 600.0  # seconds that one rendezvous may take
    # Seconds without a newcomer after which a round smaller than the maximum is formed. None: `FIRST_CALL` until as
    # many agents as the maximum have been seen, then `LATER_CALL`.
    last_call: float | None = None
    rejoin: float = 45.0  # seconds to wait for living members that do not come back
    shrink_after: float = 0.0  # seconds for which survivors wait for replacements before they go on with fewer
    ttl: float = 3.0  # seconds after which a silent agent counts as gone
    close_timeout: float = 30.0  # seconds of attempts to record the job's end in the store
    allowed: tuple[int, ...] = ()  # the world sizes to choose from, as 2:4:8
    prefix: str = PREFIX
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    token_file: str = ""
    ca: str = ""

    @property
    def settings(self) -> JoinSettings:
        first, later = (FIRST_CALL, LATER_CALL) if self.last_call is None else (self.last_call, self.last_call)
        return JoinSettings(patience=Patience(later, self.rejoin, self.shrink_after, first), ttl=self.ttl)


_SECONDS = {
    "timeout": (1.0, 2 * 86400.0),
    "last_call": (0.0, 3600.0),
    "rejoin": (1.0, 3600.0),
    "shrink_after": (0.0, 86400.0),
    "ttl": (2.0, 300.0),
    "close_timeout": (1.0, 3600.0),
}
_COMMON = ("timeout", "last_call", "rejoin", "shrink_after", "ttl", "close_timeout", "allowed", "ca_file", "protocol")
ETCD_KEYS = (*_COMMON, "prefix", "user", "password_file", "cert_file", "key_file", "secret_dir")
# Keys of `--rdzv-conf`, and the files in a mounted Secret that give their values.
_IN_SECRET = {"password_file": "password", "ca_file": "ca.crt", "cert_file": "tls.crt", "key_file": "tls.key"}
OPERATOR_KEYS = (*_COMMON, "token_file")
OPERATOR_PORT = 8080


def read(config: Mapping[str, Any], endpoint: str) -> Configuration:
    """For etcd. Raises ConfigurationInvalid."""
    values = _values(config, ETCD_KEYS)
    if folder := values.pop("secret_dir", ""):
        values = {**_of_secret(Path(folder)), **values}
    if not endpoint:
        raise ConfigurationInvalid("--rdzv-endpoint is missing: give etcd's members, as host:2379,host:2379")
    wanted = _wants_tls(values)
    try:
        urls = endpoints(endpoint, tls=wanted)
    except ValueError as e:
        raise ConfigurationInvalid(f"--rdzv-endpoint: {e}") from e
    _check_scheme(urls, tls=wanted or any(url.startswith("https:") for url in urls))
    settings = Configuration(urls, **values)
    if bool(settings.user) != bool(settings.password_file):
        raise ConfigurationInvalid("--rdzv-conf: user and password_file go together")
    if settings.cert_file and not settings.ca_file.strip() and not any(u.startswith("https:") for u in urls):
        raise ConfigurationInvalid("--rdzv-conf: cert_file needs TLS: give ca_file, or endpoints with https://")
    return settings


def read_operator(config: Mapping[str, Any], endpoint: str, environ: Mapping[str, str]) -> Configuration:
    """For the operator's round store. A key that is not given comes from the pod's environment, set by the operator.

    Raises ConfigurationInvalid.
    """
    values = {"token_file": environ.get(env.TOKEN_FILE, ""), **_values(config, OPERATOR_KEYS)}
    endpoint = endpoint or environ.get(env.REPORT_URL, "").removesuffix(REPORT_PATH)
    if not endpoint:
        raise ConfigurationInvalid(
            f"--rdzv-endpoint is missing, and so is {env.REPORT_URL}, which a TrainingJob's pods have: give the"
            " operator's address, as host:port"
        )
    if not values["token_file"]:
        raise ConfigurationInvalid(
            f"--rdzv-conf: token_file is missing, and so is {env.TOKEN_FILE}, which a TrainingJob's pods have"
        )
    wanted = _wants_tls(values)
    try:
        url = base_url(endpoint, OPERATOR_PORT, tls=wanted or bool(environ.get(env.CA_CERTIFICATES)))
    except ValueError as e:
        raise ConfigurationInvalid(f"--rdzv-endpoint: {e}") from e
    _check_scheme((url,), tls=wanted)
    ca = "" if values.get("ca_file") else environ.get(env.CA_CERTIFICATES, "")
    return Configuration((url,), ca=ca, **values)


def _wants_tls(values: dict[str, Any]) -> bool:
    """Whether endpoints without a scheme are `https://`. Removes torch's key `protocol` from the values."""
    protocol = values.pop("protocol", "")
    if protocol not in ("", "http", "https"):
        raise ConfigurationInvalid(f"--rdzv-conf: protocol={protocol}: http or https is expected")
    return protocol == "https" or "ca_file" in values


def _check_scheme(urls: Collection[str], *, tls: bool) -> None:
    """Raises ConfigurationInvalid for an address to which a token or a password would go in plain text, though `tls`
    was asked for."""
    plain = [url for url in urls if url.startswith("http:")]
    if tls and plain:
        raise ConfigurationInvalid(
            f"--rdzv-endpoint: {plain[0]} is not encrypted, and ca_file, protocol=https or another endpoint asks for"
            " TLS: write https:// everywhere, or leave those out"
        )


def _of_secret(folder: Path) -> dict[str, Any]:
    """The keys for etcd that a mounted Secret holds."""
    keys: dict[str, Any] = {key: str(folder / name) for key, name in _IN_SECRET.items() if (folder / name).is_file()}
    try:
        if (user := folder / "username").is_file():
            keys["user"] = user.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigurationInvalid(f"--rdzv-conf: secret_dir: {e}") from e
    if not keys:
        names = ", ".join(("username", *_IN_SECRET.values()))
        raise ConfigurationInvalid(f"--rdzv-conf: secret_dir={folder}: none of {names} is there")
    return keys


def _values(config: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        translation = translated(config, keys)
    except Clash as e:
        raise ConfigurationInvalid(f"--rdzv-conf: {e}") from e
    unknown = sorted(set(translation.values) - set(keys))
    if unknown:
        raise ConfigurationInvalid(f"--rdzv-conf: {', '.join(_unknown(key, keys) for key in unknown)}")
    if translation.unused:
        unused = "; ".join(f"{key} ({why})" for key, why in sorted(translation.unused.items()))
        log.warning("--rdzv-conf: without meaning here: %s", unused)
    values: dict[str, Any] = {}
    for key, value in translation.values.items():
        if key in _SECONDS:
            values[key] = _seconds(key, value, translation.given.get(key, key))
        elif key == "allowed":
            values[key] = _sizes(value)
        else:
            values[key] = str(value)
    return values


def _unknown(key: str, keys: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, (*keys, *KEYS), 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(keys)}"
    return f"{key}: no such key; {hint}"


def operator_calls(settings: Configuration) -> OperatorCalls:
    """The client that the configuration describes. Raises StoreRefused."""
    return OperatorCalls(settings.urls[0], settings.token_file, settings.ca_file, ca=settings.ca)


def etcd_gateway(settings: Configuration) -> Gateway:
    """The client that the configuration describes. Raises ConfigurationInvalid, StoreRefused."""
    password = ""
    if settings.password_file:
        try:
            password = Path(settings.password_file).read_text().rstrip("\n")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigurationInvalid(f"--rdzv-conf: password_file: {e}") from e
    access = Access(settings.user, password, settings.ca_file, settings.cert_file, settings.key_file)
    return Gateway(settings.urls, access)


def _seconds(key: str, value: object, given: str) -> float:
    """`given`: the name of the key on the command line."""
    low, high = _SECONDS[key]
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = float("nan")
    if not low <= seconds <= high:
        raise ConfigurationInvalid(
            f"--rdzv-conf: {given}={value}: a number of seconds from {low:g} to {high:g} is expected"
        )
    return seconds


def _sizes(value: object) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in str(value).split(":")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1 or sizes[-1] > MAX_MEMBERS:
        raise ConfigurationInvalid(f"--rdzv-conf: allowed={value}: numbers of agents with colons between, as 2:4:8")
    return sizes
