"""The pod of a bearer token where the operator may ask for no TokenReview, which no Role can grant.

Three facts stand in for the review: the cluster has signed the token, it has not expired, and the API server shows a
pod with its UID, which is in a namespace whose jobs are run, and whose grace period is not long over. What only a
review knows is lost: whether the service account was deleted, or its tokens were revoked, while the pod lives.
Invariant: a token of which one of the three is not known is not accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from everstep.contract import labels
from everstep_operator.endpoint.token_claims import PodIdentity, read_claims
from everstep_operator.endpoint.token_reviews import Authenticate
from everstep_operator.endpoint.token_signatures import SigningKeys
from everstep_operator.errors import RetryableError
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import NotFound
from everstep_operator.kube.resources import PODS


class NotWatched(RetryableError):
    """A pod of a namespace that is not watched. It is not refused: the namespace may be missing in the list by mistake,
    and an agent that is refused ends its worker."""


# By the operator's own clock, which may be wrong. The kubelet renews a token ten minutes before its hour is over, so a
# clock that is an hour ahead refuses no worker; and a stolen token is of use for an hour longer. The same holds for the
# end of a deleted pod's grace period: a clock that is some minutes ahead must not refuse a worker that is still saving.
LEEWAY = 3600.0


def authenticator(
    client: KubeClient, keys: SigningKeys, namespaces: Collection[str], now: Callable[[], float]
) -> Authenticate:
    """`namespaces`: whose jobs are run; empty: all. `now`: seconds since 1970."""

    async def authenticate(token: str) -> PodIdentity | None:
        claims = read_claims(token, labels.TOKEN_AUDIENCE)
        pod = claims.pod
        if now() > claims.expires + LEEWAY or not await keys.verify(token, claims):
            return None
        if namespaces and pod.namespace not in namespaces:
            raise NotWatched(f"this operator does not run the jobs of namespace {pod.namespace} (watchNamespaces)")
        try:
            living = await client.get(PODS, pod.namespace, pod.pod_name)
        except NotFound:
            return None
        # A worker that was asked to stop still saves and leaves, so its token is good until the grace period is over. A
        # review then accepts it for 60 s more, by the API server's clock. The pod may stay long after that: its node is
        # lost, or it has a finalizer.
        grace_ends = living.metadata.deletion_timestamp
        if grace_ends is not None and now() > grace_ends.timestamp() + LEEWAY:
            return None
        return pod if living.metadata.uid == pod.pod_uid else None

    return authenticate
