"""`python -m everstep_operator.installation_check`: what `helm test` runs in a pod, as a worker would see the operator.

It reads three facts: the API server serves TrainingJobs, a replica renews the Lease, and the operator answers at the
address that workers get. Each has a line. The exit code is 1 if one of them does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from everstep_operator.errors import RetryableError
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.credentials import InCluster, find_source, own_namespace
from everstep_operator.kube.errors import CredentialsError, KubeError, NotFound
from everstep_operator.kube.resources import LEASES
from everstep_operator.kube.transport import HttpKubeClient
from everstep_operator.main import JOBS, LEASE

SECONDS = 30.0  # for each fact: a replica that was just started may wait for the Lease of the one before
RENEWED = 2.0  # seconds: a leader renews its Lease each second
ANSWER = 5.0  # seconds for a request


class CheckError(RetryableError):
    """A fact that does not hold. The text says what to do."""


async def serves_jobs(client: KubeClient, namespace: str) -> str:
    try:
        await client.list(JOBS, namespace)
    except NotFound as e:
        raise CheckError(
            "the API server has no TrainingJobs: install the chart with crds.install=true, or manifests/crd.yaml"
        ) from e
    return "the API server serves TrainingJobs"


async def leads(client: KubeClient, namespace: str) -> str:
    """No clock but the holder's is read: its time has to change."""
    advice = f"see `kubectl -n {namespace} logs -l app.kubernetes.io/component=operator`"
    try:
        before = (await client.get(LEASES, namespace, LEASE)).spec
        await asyncio.sleep(RENEWED)
        now = (await client.get(LEASES, namespace, LEASE)).spec
    except NotFound as e:
        raise CheckError(f"no replica leads: there is no Lease {LEASE}; {advice}") from e
    if not now.holder_identity or now.renew_time == before.renew_time:
        raise CheckError(f"no replica leads: nobody renews the Lease {LEASE}; {advice}")
    return f"{now.holder_identity} leads"


async def answers(url: str, ca_file: Path | None = None) -> str:
    """`ca_file`: by which a server of https:// is verified, as workers do; without it, as the image does."""
    trust = ssl.create_default_context(cafile=ca_file) if ca_file is not None else True
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER)) as session,
            session.get(f"{url}/healthz", ssl=trust) as response,
        ):
            if response.status == 200:
                return f"the operator answers at {url}"
            problem = f"status {response.status}"
    except (aiohttp.ClientError, TimeoutError) as e:
        problem = str(e) or f"no answer in {ANSWER:g} s"
    where = "the Secret that tls.secretName means" if "CERTIFICATE" in problem else "the Service and NetworkPolicies"
    raise CheckError(f"workers do not reach the operator at {url}: {problem}; look at {where}")


async def check(
    client: KubeClient, namespace: str, url: str, seconds: float = SECONDS, *, ca_file: Path | None = None
) -> bool:
    """Print a line for each fact, which has to hold within `seconds`; whether all do."""
    facts: tuple[Callable[[], Awaitable[str]], ...] = (
        lambda: serves_jobs(client, namespace),
        lambda: leads(client, namespace),
        lambda: answers(url, ca_file),
    )
    return all([await _holds(fact, seconds) for fact in facts])


async def _holds(fact: Callable[[], Awaitable[str]], seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            text, holds = await fact(), True
        except (CheckError, KubeError) as e:
            text, holds = str(e), False
        if holds or loop.time() > deadline:
            sys.stdout.write(f"{'ok    ' if holds else 'FAILED'} {text}\n")
            return holds
        await asyncio.sleep(RENEWED / 2)


async def _in_pod(source: InCluster, ca_file: Path | None) -> bool:
    async with HttpKubeClient(source) as client:
        return await check(client, own_namespace(source), os.environ["EVERSTEP_REPORT_URL"], ca_file=ca_file)


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m everstep_operator.installation_check", description=(__doc__ or "").partition("\n\n")[2]
    ).parse_args()
    try:
        source = find_source(os.environ, None, None)
        if not isinstance(source, InCluster):
            sys.stdout.write("FAILED this runs in a pod of the chart: `helm test RELEASE -n NAMESPACE --logs`\n")
            return 2
        ca_file = Path(os.environ.get("EVERSTEP_TLS_DIR", ""), "ca.crt")  # none: an authority that the image knows
        has_authority = ca_file.is_file() and ca_file.stat().st_size > 0
        return 0 if asyncio.run(_in_pod(source, ca_file if has_authority else None)) else 1
    except CredentialsError as e:
        sys.stdout.write(f"FAILED {e}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
