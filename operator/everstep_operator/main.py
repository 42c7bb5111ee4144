"""The operator's process: it reads the settings, connects the parts, and runs until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from everstep.contract import labels, variables
from everstep.contract.messages import Report
from everstep_operator.arguments import Invocation, read
from everstep_operator.controller.apply import Applier
from everstep_operator.controller.caches import BY_OWNER, Caches
from everstep_operator.controller.event_handlers import EventHandlers
from everstep_operator.controller.incidents import Incidents
from everstep_operator.controller.pod_events import PodEvents
from everstep_operator.controller.reconcile import Reconciler
from everstep_operator.controller.record import Recorder
from everstep_operator.controller.report_receiver import ReportReceiver
from everstep_operator.endpoint import auth, server, signed_tokens, token_reviews
from everstep_operator.endpoint.callers import Caller, Callers
from everstep_operator.endpoint.certificates import Certificates, CertificateUnusable
from everstep_operator.endpoint.report_endpoint import ReportEndpoint
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.endpoint.token_reviews import IdentityCache
from everstep_operator.endpoint.token_signatures import SigningKeys
from everstep_operator.kube.clients import Clients, connected
from everstep_operator.kube.errors import CredentialsError
from everstep_operator.kube.resources import custom_resource
from everstep_operator.kube.wire import Unstructured
from everstep_operator.plan.snapshot import JobView, Settings
from everstep_operator.rounds.agent_lookup import answers, find_agent, job_ref, view_of
from everstep_operator.rounds.documents import JobRef, RoundDocuments
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.rounds.routes import RoundRoutes
from everstep_operator.runtime.clock import Clock, SystemClock
from everstep_operator.runtime.control_loop import Controller, ControllerLimits, Outcome, Succeeded
from everstep_operator.runtime.expectations import Expectations
from everstep_operator.runtime.garbage_collection import freeze_startup_objects
from everstep_operator.runtime.leader import LeaderElector, Leading, LeaseTiming
from everstep_operator.runtime.leader_probe import LeaderProbe
from everstep_operator.runtime.leaderless import Leaderless
from everstep_operator.runtime.queue import WorkQueue
from everstep_operator.runtime.write_limit import WriteLimit, WriteSlots
from everstep_operator.settings import VARIABLES, OperatorSettings, SettingsError, names_collector
from everstep_operator.telemetry.job_metrics import ClusterFigures
from everstep_operator.telemetry.logs import setup
from everstep_operator.telemetry.metrics import Metrics
from everstep_operator.telemetry.recovery_trace import RecoveryTrace
from everstep_operator.worker_pods import Key

if TYPE_CHECKING:
    from everstep_operator.telemetry.otlp import Traces

log = logging.getLogger("everstep.operator")

LEASE = "everstep-operator"
JOBS = custom_resource(labels.GROUP, labels.VERSION, labels.PLURAL, labels.KIND, Unstructured)
METRICS_INTERVAL = 5.0
WRITES = WriteSlots()
MAX_FILES = 65_536


class Operator:
    """All parts of one replica. `run()` returns when it is cancelled, and gives the Lease back then."""

    def __init__(
        self,
        clients: Clients,
        settings: OperatorSettings,
        metrics: Metrics,
        clock: Clock,
        *,
        on_report: Callable[[PodIdentity, Report], None] = lambda _identity, _report: None,
        on_recovery: Callable[[RecoveryTrace], None] = lambda _trace: None,
        synced: Callable[[], None] = freeze_startup_objects,
        alone: bool = False,
    ) -> None:
        """`on_report` is called with every accepted report, `on_recovery` with each recovery that is over. `synced` is
        called once, when the caches are full. It changes the garbage collection of the whole process, so the operator
        must be alone in it. `alone`: this API server can have no other operator; see `LeaderElector`."""
        self._clock, self.metrics, self._settings, self._synced = clock, metrics, settings, synced
        rng = random.SystemRandom().random
        self.caches = Caches.of(
            clients.watches,
            JOBS,
            clock=clock,
            rng=rng,
            relisted=metrics.relisted,
            network_policies=settings.job_network_policies,
            pod_groups=settings.pod_groups,
            namespaces=settings.watch_namespaces,
            nodes=settings.read_nodes,
            queues=settings.kueue,
        )
        self.leader_probe = LeaderProbe(lambda: self.elector.other_holder_address())  # noqa: PLW0108 - the elector is made below, with this probe
        self.elector = LeaderElector(
            clients.lease,
            namespace=settings.namespace,
            name=LEASE,
            identity=settings.identity,
            clock=clock,
            rng=rng,
            timing=LeaseTiming.of(settings.lease_seconds),
            on_change=self._leadership_changed,
            health=self.leader_probe.health,
            alone=alone,
        )
        self.leaderless = Leaderless(self.elector, clock)
        self.queue: WorkQueue[Key] = WorkQueue(clock, rng, on_wait=metrics.queue_wait)
        expectations: Expectations[Key] = Expectations()
        require = self.elector.require
        clients.guard(require)
        self.rounds = RoundRegistry(
            RoundDocuments(clients.rounds, JOBS, require_leading=require),
            clock=clock,
            epoch=require,
            changed=lambda job: self.queue.add((job.namespace, job.name)),
        )
        limit = WriteLimit(WRITES, on_wait=lambda lane, seconds: metrics.write_wait(lane.name.lower(), seconds))
        applier = Applier(
            clients.jobs,
            JOBS,
            expectations,
            require_leading=require,
            monotonic=clock.monotonic,
            set_sizes=lambda job, *sizes: self.rounds.of(_ref(job)).set_sizes(*sizes),
            begin_rounds=lambda job, sizes, after: self.rounds.of(_ref(job)).begin_anew(sizes, after),
            is_superseded=self._is_superseded,
            limit=limit,
        )
        recorder = Recorder(
            clients.jobs, JOBS, instance=settings.pod_name, require_leading=require, now=clock.now, limit=limit
        )
        self.reconciler = Reconciler(
            self.caches,
            applier,
            recorder,
            expectations,
            clock=clock,
            settings=Settings(
                settings.report_url,
                settings.checkpoint_url_prefixes,
                network_policies=settings.job_network_policies,
                pod_groups=frozenset(settings.pod_groups),
                volume_claims=settings.volume_claims,
            ),
            metrics=metrics,
            pod_events=PodEvents(clients.watches, clock),
            incidents=Incidents(on_recovery),
            round_view=lambda job: view_of(self.rounds, job, is_new=self._is_new(job)),
            answers=lambda job, pod_uid: answers(self.rounds, job, pod_uid),
            forget=self.rounds.forget,
            rounds_write_failure=lambda job: self.rounds.write_failure(job_ref(job)),
        )
        metrics.figures_from(lambda: self.reconciler.figures() if self.elector.is_leader() else ClusterFigures())
        EventHandlers(self.caches, self.queue, expectations, self.rounds)
        self.controller = Controller(
            "trainingjobs",
            self.reconciler.reconcile,
            self.queue,
            leadership=self.elector,
            all_keys=lambda: [obj.key for obj in self.caches.jobs.list()],
            clock=clock,
            limits=ControllerLimits(workers=settings.workers),
            on_outcome=self._outcome,
        )

        receiver = ReportReceiver(self.reconciler, self.queue, clock, self.rounds)

        def accept(caller: Caller, report: Report) -> None:
            receiver.accept(caller, report)
            on_report(caller.identity, report)

        callers = Callers(self.caches.pods, self.caches.jobs, clients.callers)
        keys = SigningKeys(clients.callers.signing_keys, monotonic=clock.monotonic)
        self._identities = IdentityCache(
            token_reviews.authenticator(clients.callers)
            if settings.review_tokens
            else signed_tokens.authenticator(
                clients.callers, keys, settings.watch_namespaces, lambda: clock.now().timestamp()
            ),
            audience=labels.TOKEN_AUDIENCE,
            keys=keys,
            monotonic=clock.monotonic,
            exists=callers.exists,
        )
        checks = auth.RequestAuth(self._identities, self._leadership, find=callers.find)
        reports = ReportEndpoint(checks, accept, metrics)
        rounds = RoundRoutes(self.rounds, checks, agent=partial(find_agent, callers), metrics=metrics)
        calls = [reports.add_to, rounds.add_to, server.add_alive]
        at_plain_port: list[server.AddRoutes] = [*calls]
        self.certificates: Certificates | None = None
        self.tls_server: server.HttpServer | None = None
        if settings.tls_dir:
            host = urlsplit(settings.report_url).hostname or ""
            self.certificates = Certificates(settings.tls_dir, host, clock, self._certificate_changed)
            self.tls_server = server.HttpServer(
                calls,
                server.ServerOptions(host=settings.host, port=settings.tls_port, tls=self.certificates.context),
            )
            if not settings.plain_calls:
                at_plain_port = [server.add_alive, server.add_refusal_of_plain_calls(settings.report_url)]
        self.server = server.HttpServer(at_plain_port, server.ServerOptions(host=settings.host, port=settings.port))
        self.probes = server.HttpServer(
            [server.Probes(metrics, {"caches": self.caches.waiting}).add_to],
            server.ServerOptions(host=settings.host, port=settings.probe_port, bounds=server.PROBE_BOUNDS),
        )

        self.page: server.HttpServer | None = None
        if settings.page_port is not None:
            # It loads a template engine, which an operator without a page does not need.
            from everstep_operator.page.in_operator import page_server  # noqa: PLC0415

            self.page = page_server(self.caches, clients.page, clock, settings.host, settings.page_port)

    async def run(self) -> None:
        """Serve, watch, and lead when allowed."""
        page, tls = self.page or contextlib.nullcontext(), self.tls_server or contextlib.nullcontext()
        async with self.probes, self.server, tls, page, asyncio.TaskGroup() as group:
            log.info("serving", extra={"host": self._settings.host or "all", **self._ports()})
            group.create_task(self.caches.run())
            group.create_task(self._measure())
            group.create_task(self.leaderless.run())
            if self.certificates is not None:
                group.create_task(self.certificates.run())
            await self.caches.wait_synced()
            self._synced()
            # A replica leads only with full caches: a leader that sees no pods would take all of them for lost.
            group.create_task(self.elector.run())
            group.create_task(self.leader_probe.run())
            group.create_task(self.controller.run())

    def _is_superseded(self, job: JobView) -> bool:
        """Whether that job is gone, or a newer spec of it is known: `spec.suspend`, say."""
        known = self.caches.jobs.get(job.namespace, job.name)
        if known is None or known.metadata.uid != job.uid or known.metadata.deletion_timestamp is not None:
            return True
        return known.metadata.generation > job.generation

    def _is_new(self, job: Unstructured) -> bool:
        """Whether nothing was done for that job yet, as far as is known: a pass writes its status before all else."""
        return not job.status and not self.caches.pods.by_index(BY_OWNER, job.metadata.uid)

    def _ports(self) -> dict[str, int]:
        page = {} if self.page is None else {"page_port": self.page.port}
        tls = {} if self.tls_server is None else {"tls_port": self.tls_server.port}
        return {"port": self.server.port, "probe_port": self.probes.port, **tls, **page}

    def _certificate_changed(self, ca: str, ends: datetime) -> None:
        self.reconciler.trust(ca)
        self.metrics.certificate_ends(ends.timestamp())

    def _leadership_changed(self, state: object) -> None:
        leading = isinstance(state, Leading)
        self.metrics.leader(leading)
        self.rounds.forget_all()
        if leading:
            self.reconciler.forget_all()
            self._identities.forget()

    def _leadership(self) -> auth.LeaderLocation:
        leads, address = self.elector.is_leader(), self.elector.holder_address()
        if address is not None:
            host = address.rpartition(":")[0]
            tls = "" if self.tls_server is None else f"https://{host}:{self.tls_server.port}"
            at = auth.LeaderAt(f"http://{address}", tls)
            return auth.LeaderHere(at) if leads else at
        if leads:
            return auth.LeaderHere()
        starting = self.caches.waiting()
        if starting:
            return auth.LeaderUnknown(f"this replica starts: it {starting}")
        notice = self.leaderless.notice()
        return auth.LeaderUnknown() if notice is None else auth.LeaderUnknown(notice)

    def _outcome(self, key: Key, outcome: Outcome, seconds: float) -> None:
        self.metrics.reconciled(seconds, failed=not isinstance(outcome, Succeeded))

    async def _measure(self) -> None:
        while True:
            self.metrics.queue_depth(len(self.queue))
            self.metrics.leaderless(self.leaderless.seconds())
            leads = self.elector.is_leader()
            self.metrics.jobs(self.reconciler.jobs_by_status() if leads else {})
            self.metrics.peak_memory(*(self.reconciler.peak_memory() if leads else (0, 0)))
            await self._clock.sleep(METRICS_INTERVAL)


async def _serve(invocation: Invocation, traces: Traces | None) -> None:
    settings, clock, metrics = invocation.settings, SystemClock(), Metrics()
    namespaces = max(1, len(settings.watch_namespaces))
    async with connected(
        invocation.cluster.source, WRITES.total, metrics.api_request, namespaces=namespaces
    ) as clients:
        send = (lambda _trace: None) if traces is None else traces.send
        task = asyncio.create_task(Operator(clients, settings, metrics, clock, on_recovery=send).run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        log.info(
            "operator starts",
            extra={
                "identity": settings.identity,
                "namespace": settings.namespace,
                "watches": ", ".join(settings.watch_namespaces) or "all namespaces",
                "cluster": str(invocation.cluster),
            },
        )
        if not settings.read_nodes:
            log.warning(
                "nodes are not read: workers of a lost node are replaced when Kubernetes deletes their pods (after "
                "five minutes, unless the template tolerates less), and none is moved off a node that leaves"
            )
        with contextlib.suppress(asyncio.CancelledError):
            await task
        log.info("operator stops")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `everstep-operator`."""
    try:
        invocation = read(sys.argv[1:] if argv is None else argv, os.environ)
        traces = _traces(invocation.settings.pod_name)
    except (SettingsError, CredentialsError) as e:
        print(f"everstep-operator: {e}", file=sys.stderr)  # noqa: T201  # logging is not set up yet
        return 2
    setup(invocation.settings.log_level)
    for unknown in variables.unknown(os.environ, [v.name for v in VARIABLES]):
        log.warning("%s", unknown)
    _allow_files()
    try:
        asyncio.run(_serve(invocation, traces))
    except CertificateUnusable as e:
        log.error("the port for workers has no certificate", extra={"reason": str(e)})
        return 2
    finally:
        if traces is not None:
            traces.close()
    return 0


def _traces(instance: str) -> Traces | None:
    """None where no collector is named. Raises SettingsError where the exporter is not installed."""
    if (variable := names_collector(os.environ)) is None:
        return None
    try:
        from everstep_operator.telemetry.otlp import Traces  # noqa: PLC0415  # most operators send none
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{variable}: the package {error.name} sends traces, and is not installed: "
            "pip install 'everstep-operator[otel]', or unset the variable"
        ) from error
    return Traces(instance)


def _ref(job: JobView) -> JobRef:
    return JobRef(job.namespace, job.name, job.uid)


def _allow_files() -> None:
    """Allow as many open files as the container may have: each agent that waits for its round holds a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
