"""The operator's configuration, from flags and from EVERSTEP_* variables that the Helm chart sets.

Each setting is one `Variable`: its name in the environment, and the flag of the same name. A flag wins. The error for a
wrong value names the flag or variable.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.contract import redact
from everstep.contract.addresses import host_and_port
from everstep_operator import object_names
from everstep_operator.api.types import GangScheduler
from everstep_operator.errors import TerminalError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
PREFIX = "EVERSTEP_"
MAX_NAMESPACES = 32  # each has six watches, and so many connections


class SettingsError(TerminalError):
    """A setting cannot be used. The text names the flag or variable, and says what is expected."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting, with the text that `--help` prints. `default` is empty if it depends on the machine."""

    name: str
    text: str
    default: str = ""
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.removeprefix(PREFIX).lower().replace("_", "-")


NAMESPACE = Variable("EVERSTEP_NAMESPACE", "namespace of the Lease that decides which operator leads")
VARIABLES = (
    NAMESPACE,
    Variable("EVERSTEP_POD_NAME", "name of this replica in the Lease (default: the host's name)"),
    Variable("EVERSTEP_POD_IP", "address that the other replicas redirect to", "127.0.0.1"),
    Variable("EVERSTEP_HOST", "address to serve workers, probes and metrics on (default: all)"),
    Variable("EVERSTEP_PORT", "port to serve workers on, 0 to 65535; 0: any free one", "8080"),
    Variable("EVERSTEP_PROBE_PORT", "port to serve probes and metrics on, 0 to 65535; 0: any free one", "8081"),
    Variable("EVERSTEP_PAGE_PORT", "port of the page about jobs, 0 to 65535; 0: any free one; empty: there is no page"),
    Variable("EVERSTEP_REPORT_URL", "URL to which workers report; empty: they do not report"),
    Variable(
        "EVERSTEP_TLS_DIR",
        "folder with tls.crt and tls.key, or with ca.key, by which the operator signs a certificate for itself; and "
        "with ca.crt, by which workers verify it; empty: there is no TLS",
    ),
    Variable("EVERSTEP_TLS_PORT", "port to serve workers on by TLS, 0 to 65535; 0: any free one", "8443"),
    Variable(
        "EVERSTEP_PLAIN_CALLS",
        "whether workers are served without TLS too, where there is TLS: those from before have no other address",
        "true",
        ("true", "false"),
    ),
    Variable(
        "EVERSTEP_CHECKPOINT_URL_PREFIXES", "allowed beginnings of checkpoint URLs, separated by commas; empty: any"
    ),
    Variable(
        "EVERSTEP_JOB_NETWORK_POLICIES",
        "whether each job gets a NetworkPolicy, by which only its own pods reach its workers",
        "false",
        ("true", "false"),
    ),
    Variable(
        "EVERSTEP_VOLUME_CLAIMS",
        "whether the operator makes the volume claims that jobs ask for",
        "false",
        ("true", "false"),
    ),
    Variable(
        "EVERSTEP_POD_GROUPS",
        f"schedulers whose PodGroups jobs may have, separated by commas: {', '.join(GangScheduler)}; empty: none",
    ),
    Variable(
        "EVERSTEP_WATCH_NAMESPACES",
        f"namespaces whose jobs are run, separated by commas, at most {MAX_NAMESPACES}; empty: all of the cluster",
    ),
    Variable(
        "EVERSTEP_READ_NODES",
        "whether nodes are watched, so that workers of a lost one are replaced, and those of one that leaves are moved",
        "true",
        ("true", "false"),
    ),
    Variable(
        "EVERSTEP_KUEUE",
        "whether jobs with the label kueue.x-k8s.io/queue-name wait for quota of that queue of Kueue",
        "false",
        ("true", "false"),
    ),
    Variable(
        "EVERSTEP_REVIEW_TOKENS",
        "whether the API server reviews workers' tokens; false: their signatures and pods are looked at",
        "true",
        ("true", "false"),
    ),
    Variable("EVERSTEP_LEASE_SECONDS", "seconds until another replica takes over from a dead leader, 3 to 120", "6"),
    Variable("EVERSTEP_WORKERS", "jobs that are worked on at a time, 1 to 1024", "32"),
    Variable("EVERSTEP_LOG_LEVEL", "lowest level that is logged", "INFO", LEVELS),
)


# Those of OpenTelemetry by which its exporter finds the collector; the first that is set counts.
OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OTLP_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP_HTTP = "http/protobuf"


def names_collector(environ: Mapping[str, str]) -> str | None:
    """The variable that names a collector of traces; None: no traces are sent. Raises SettingsError for a collector
    that the exporter could not reach."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    name = next((name for name in OTLP_ENDPOINTS if environ.get(name)), None)
    if name is None:
        return None
    if not environ[name].startswith(("http://", "https://")):
        raise SettingsError(f"{name}: {redact.text(environ[name])!r} is no URL such as http://collector:4318")
    protocol = next((protocol for protocol in OTLP_PROTOCOLS if environ.get(protocol)), None)
    if protocol is not None and environ[protocol] != OTLP_HTTP:
        raise SettingsError(
            f"{protocol}: {environ[protocol]!r}: traces are sent by {OTLP_HTTP} alone, which collectors take at port "
            "4318"
        )
    return name


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of values: flags (by the name of their variable), then the environment."""

    environ: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str, default: str = "") -> str:
        return self.flags.get(name) or self.environ.get(name) or default

    def source_of(self, name: str) -> str:
        """The flag or variable that the value came from."""
        flag = next((v.flag for v in VARIABLES if v.name == name), name)
        return flag if self.flags.get(name) else name


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    namespace: str  # of the Lease
    pod_name: str
    pod_ip: str
    host: str  # the address that workers, probes and metrics are served on; empty: all
    port: int  # for workers
    probe_port: int  # for probes and metrics
    report_url: str  # given to workers
    checkpoint_url_prefixes: tuple[str, ...]
    job_network_policies: bool
    lease_seconds: int
    workers: int
    log_level: str
    pod_groups: tuple[GangScheduler, ...] = ()
    volume_claims: bool = False
    page_port: int | None = None  # None: there is no page
    watch_namespaces: tuple[str, ...] = ()  # whose jobs are run; empty: all
    read_nodes: bool = True
    review_tokens: bool = True
    kueue: bool = False  # whether jobs wait in queues of Kueue
    tls_dir: str = ""  # empty: no TLS
    tls_port: int = 8443
    plain_calls: bool = True

    @property
    def identity(self) -> str:
        """The holder's identity in the Lease. It contains the address to which followers redirect."""
        return f"{self.pod_name}_{host_and_port(self.pod_ip, self.port)}"

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] = os.environ, flags: Mapping[str, str] | None = None
    ) -> OperatorSettings:
        """Read the settings. `flags` has values by the name of their variable. Raises SettingsError for the first wrong
        value."""
        sources = Sources(environ, flags or {})
        defaults = {v.name: v.default for v in VARIABLES}
        level = sources.text("EVERSTEP_LOG_LEVEL", defaults["EVERSTEP_LOG_LEVEL"])
        if level.upper() not in LEVELS:
            raise SettingsError(
                f"{sources.source_of('EVERSTEP_LOG_LEVEL')}: {level!r} is not {', '.join(LEVELS[:-1])} or {LEVELS[-1]}"
            )

        def switch(name: str) -> bool:
            text = sources.text(name, defaults[name])
            if text not in ("true", "false"):
                raise SettingsError(f"{sources.source_of(name)}: {text!r} is neither true nor false")
            return text == "true"

        def number(name: str, low: int, high: int) -> int:
            text = sources.text(name, defaults[name])
            if not text.isdecimal() or not low <= int(text) <= high:
                raise SettingsError(f"{sources.source_of(name)}: {text!r} is not a whole number from {low} to {high}")
            return int(text)

        return cls(
            namespace=sources.text("EVERSTEP_NAMESPACE", "default"),
            pod_name=sources.text("EVERSTEP_POD_NAME", socket.gethostname()),
            pod_ip=sources.text("EVERSTEP_POD_IP", defaults["EVERSTEP_POD_IP"]),
            host=sources.text("EVERSTEP_HOST"),
            port=number("EVERSTEP_PORT", 0, 65535),
            probe_port=number("EVERSTEP_PROBE_PORT", 0, 65535),
            report_url=sources.text("EVERSTEP_REPORT_URL"),
            checkpoint_url_prefixes=_listed(sources, "EVERSTEP_CHECKPOINT_URL_PREFIXES", "any URL"),
            job_network_policies=switch("EVERSTEP_JOB_NETWORK_POLICIES"),
            pod_groups=_pod_groups(sources),
            volume_claims=switch("EVERSTEP_VOLUME_CLAIMS"),
            lease_seconds=number("EVERSTEP_LEASE_SECONDS", 3, 120),
            workers=number("EVERSTEP_WORKERS", 1, 1024),
            log_level=level.upper(),
            page_port=number("EVERSTEP_PAGE_PORT", 0, 65535) if sources.text("EVERSTEP_PAGE_PORT") else None,
            watch_namespaces=_namespaces(sources),
            read_nodes=switch("EVERSTEP_READ_NODES"),
            review_tokens=switch("EVERSTEP_REVIEW_TOKENS"),
            kueue=switch("EVERSTEP_KUEUE"),
            tls_dir=sources.text("EVERSTEP_TLS_DIR"),
            tls_port=number("EVERSTEP_TLS_PORT", 0, 65535),
            plain_calls=switch("EVERSTEP_PLAIN_CALLS"),
        )


def _listed(sources: Sources, name: str, without: str) -> tuple[str, ...]:
    """What is between the commas. A text of commas alone is refused: whoever wrote it meant to limit something, and an
    empty list limits nothing. `without`: what an empty text means."""
    text = sources.text(name)
    listed = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not listed:
        raise SettingsError(
            f"{sources.source_of(name)}: {text!r} names nothing: write what is meant, or leave it empty, which means "
            f"{without}"
        )
    return listed


def _pod_groups(sources: Sources) -> tuple[GangScheduler, ...]:
    name = "EVERSTEP_POD_GROUPS"
    names = tuple(dict.fromkeys(_listed(sources, name, "no PodGroups")))
    for each in names:
        if each not in tuple(GangScheduler):
            raise SettingsError(f"{sources.source_of(name)}: {each!r} is not one of {', '.join(GangScheduler)}")
    return tuple(map(GangScheduler, names))


def _namespaces(sources: Sources) -> tuple[str, ...]:
    name = "EVERSTEP_WATCH_NAMESPACES"
    names = tuple(dict.fromkeys(_listed(sources, name, "all of the cluster")))
    for each in names:
        if not object_names.is_namespace(each):
            raise SettingsError(f"{sources.source_of(name)}: {each!r} is no name of a namespace")
    if len(names) > MAX_NAMESPACES:
        raise SettingsError(
            f"{sources.source_of(name)}: {len(names)} namespaces are too many: give at most {MAX_NAMESPACES}, or none, "
            "which means all of the cluster"
        )
    return names
