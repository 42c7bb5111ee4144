"""The operator's configuration, from EVERSTEP_* variables that the Helm chart sets. Wrong values name the variable."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


class SettingsError(Exception):
    """A variable has a value that cannot be used; the text names it and what is expected."""


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    namespace: str  # of the Lease
    pod_name: str
    pod_ip: str
    host: str  # the address that reports, metrics and probes are served on
    port: int
    report_url: str  # given to workers
    checkpoint_url_prefixes: tuple[str, ...]
    lease_seconds: int
    workers: int
    log_level: str

    @property
    def identity(self) -> str:
        """Holder identity in the Lease; carries the address that followers redirect to."""
        return f"{self.pod_name}_{self.pod_ip}:{self.port}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> OperatorSettings:
        """Raises SettingsError for the first variable that is wrong."""
        host = socket.gethostname()
        prefixes = environ.get("EVERSTEP_CHECKPOINT_URL_PREFIXES", "")
        level = environ.get("EVERSTEP_LOG_LEVEL", "INFO")
        if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise SettingsError(f"EVERSTEP_LOG_LEVEL: {level!r} is not DEBUG, INFO, WARNING or ERROR")
        return cls(
            namespace=environ.get("EVERSTEP_NAMESPACE", "default"),
            pod_name=environ.get("EVERSTEP_POD_NAME", host),
            pod_ip=environ.get("EVERSTEP_POD_IP", "127.0.0.1"),
            host=environ.get("EVERSTEP_HOST", "") or "0.0.0.0",  # noqa: S104  # the pod's own addresses
            port=_number(environ, "EVERSTEP_PORT", 8080, 0, 65535),
            report_url=environ.get("EVERSTEP_REPORT_URL", ""),
            checkpoint_url_prefixes=tuple(p.strip() for p in prefixes.split(",") if p.strip()),
            lease_seconds=_number(environ, "EVERSTEP_LEASE_SECONDS", 6, 3, 120),
            workers=_number(environ, "EVERSTEP_WORKERS", 8, 1, 64),
            log_level=level.upper(),
        )


def _number(environ: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise SettingsError(f"{name}: {text!r} is not a whole number from {low} to {high}")
    return int(text)
