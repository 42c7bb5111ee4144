"""What a progress report costs: the training loop that makes it, and the operator that takes it.

    python benchmarks/reporting.py [--quick] [--json PATH]

The reporter's call is timed in the caller's thread, with the operator there, away, and with no operator configured; the
endpoint is loaded over loopback by as many connections as a large job has workers, with one token each.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))
from figures import Better, Figure, finish, parser, quantile

from everstep.contract import labels
from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep.reporting.report import Reporter
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.endpoint.auth import LeaderHere, RequestAuth, RequestLimits
from everstep_operator.endpoint.report_endpoint import ReportEndpoint
from everstep_operator.endpoint.server import HttpServer, ServerOptions
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.endpoint.token_reviews import IdentityCache
from everstep_operator.endpoint.token_signatures import SigningKeys
from everstep_operator.runtime.clock import SystemClock
from everstep_operator.telemetry.metrics import Metrics

WORKERS = 200


def call_microseconds(url: str | None, token: str, calls: int, patience: float = 0.0) -> list[float]:
    reporter = Reporter(url, token)
    reporter.restored(None)
    took = []
    for step in range(1, calls + 1):
        began = time.perf_counter_ns()
        reporter.step(step, total_steps=calls, metrics={"loss": 0.5, "lr": 1e-3})
        took.append((time.perf_counter_ns() - began) / 1000)
    reporter.flush(patience)
    return took


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


async def measure(file: Path, calls: int, reports: int) -> list[Figure]:
    came: list[Report] = []
    cluster = MemoryCluster(SystemClock())
    pods = {
        cluster.issue_token("default", "default", f"w{i}", f"uid-{i}", labels.TOKEN_AUDIENCE, 3600): PodIdentity(
            "default", f"w{i}", f"uid-{i}"
        )
        for i in range(WORKERS)
    }

    async def authenticate(token: str) -> PodIdentity | None:
        return pods.get(token)

    identities = IdentityCache(
        authenticate,
        audience=labels.TOKEN_AUDIENCE,
        keys=SigningKeys(cluster.client().signing_keys, monotonic=time.monotonic),
        monotonic=time.monotonic,
    )
    file.write_text(next(iter(pods)))  # noqa: ASYNC240  # nothing else runs yet
    token = str(file)
    metrics = Metrics(process=False)
    # hostile.py measures how much one pod may send in a second.
    auth = RequestAuth(identities, LeaderHere, limits=RequestLimits(calls_rate=1e6, bytes_rate=1e9))
    endpoint = ReportEndpoint(auth, lambda _caller, report: came.append(report), metrics)
    options = ServerOptions(host="127.0.0.1", port=0)
    server = HttpServer([endpoint.add_to], options)
    async with server:
        url = f"http://127.0.0.1:{server.port}{REPORT_PATH}"
        there = await asyncio.to_thread(call_microseconds, url, token, calls, 5.0)
        if not came:
            raise RuntimeError("none of the reports reached the operator that was there: the figures would say nothing")
        rate = await load(url, list(pods), reports)
    away = call_microseconds(f"http://127.0.0.1:{closed_port()}{REPORT_PATH}", token, calls)
    none = call_microseconds(None, token, calls)
    lower, higher = Better.LOWER, Better.HIGHER
    return [
        Figure("report_call.operator_there.p50", quantile(there, 0.5), "us", lower, calls, goal=50),
        Figure("report_call.operator_there.p99", quantile(there, 0.99), "us", lower, calls),
        Figure("report_call.operator_away.p50", quantile(away, 0.5), "us", lower, calls, goal=50),
        Figure("report_call.no_operator.p50", quantile(none, 0.5), "us", lower, calls, goal=5),
        # Client and server share the machine's cores: the server alone takes more.
        Figure("intake.reports_per_second", rate, "1/s", higher, reports, goal=1000),
    ]


async def load(url: str, tokens: list[str], reports: int) -> float:
    body = Report(Phase.TRAIN, rank=0, world_size=WORKERS, at=1.0, step=1, metrics={"loss": 0.5}).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=WORKERS)) as session:

        async def worker(index: int) -> None:
            headers = {"Authorization": f"Bearer {tokens[index]}"}
            for _ in range(reports // WORKERS):
                async with session.post(url, data=body, headers=headers) as r:
                    if r.status != 204:
                        raise RuntimeError(f"the operator answered {r.status}: {await r.text()}")

        began = time.perf_counter()
        await asyncio.gather(*(worker(i) for i in range(WORKERS)))
        return reports // WORKERS * WORKERS / (time.perf_counter() - began)


if __name__ == "__main__":
    args = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:  # of the token; reading it is part of a report's cost
        figures = asyncio.run(measure(Path(folder) / "token", *((500, 1000) if args.quick else (20_000, 20_000))))
    sys.exit(finish(figures, args))
