"""The page as a part of the operator: its jobs from the caches, its readers by the cluster's own reviews."""

from __future__ import annotations

from everstep_operator.controller.caches import Caches
from everstep_operator.endpoint.server import HttpServer
from everstep_operator.kube.client import KubeClient
from everstep_operator.page.cluster import ClusterJobs
from everstep_operator.page.recorder import Recorder
from everstep_operator.page.reviews import ReviewedAccess
from everstep_operator.page.server import Page, server
from everstep_operator.runtime.clock import Clock


def page_server(caches: Caches, client: KubeClient, clock: Clock, host: str, port: int) -> HttpServer:
    """`client`: for reviews and events, with connections of its own. Port 0: any free one."""
    access = ReviewedAccess(client, clock.monotonic)
    page = Page(ClusterJobs(caches, client, Recorder(caches, clock.now), clock.monotonic), access, "this cluster")
    access.form = lambda request, status, problem: page.render("login.html", request, status, problem=problem)
    return server(page, host, port)
