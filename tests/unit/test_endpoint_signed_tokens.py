"""Tokens where no TokenReview may be asked for: what stands in for it, and what is never taken on trust."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.endpoint.signed_tokens import LEEWAY, NotWatched, authenticator
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.endpoint.token_signatures import RETRY, KeysUnknown
from everstep_operator.kube.resources import PODS
from everstep_operator.runtime.clock import SystemClock
from support.operator.tokens import HOUR, Authority, Reviewer

CLUSTER, FORGER = Authority(), Authority()


class Stage:
    """An API server with one pod, and the keys of its tokens."""

    def __init__(self) -> None:
        self.reviewer = Reviewer(CLUSTER)
        self.client = MemoryCluster(SystemClock()).client()
        self.keys = self.reviewer.signing_keys(lambda: self.reviewer.now)
        self.ahead = 0.0  # of the operator's clock

    async def create(self) -> PodIdentity:
        spec = {"nodeName": "n1", "containers": [{"name": "worker", "image": "train"}]}
        body = {"metadata": {"name": "w0"}, "spec": spec}
        made = await self.client.create(PODS, "default", body)
        return PodIdentity("default", "w0", made.metadata.uid)

    async def identify(self, token: str, namespaces: Collection[str] = ("default",)) -> PodIdentity | None:
        check = authenticator(self.client, self.keys, namespaces, lambda: time.time() + self.ahead)
        return await check(token)


async def test_signed_token_of_a_pod_that_lives_is_accepted_until_the_pod_is_deleted() -> None:
    stage = Stage()
    who = await stage.create()
    token = CLUSTER.token(who)
    assert await stage.identify(token) == who
    assert await stage.identify(token, ()) == who, "all namespaces are watched"
    with pytest.raises(NotWatched, match="default"):
        await stage.identify(token, ("team-b",))
    assert await stage.identify(FORGER.token(who), ("team-b",)) is None
    await stage.client.delete(PODS, "default", "w0", grace_seconds=0)
    assert await stage.identify(token) is None
    await stage.create()
    assert await stage.identify(token) is None, "another pod has its name"


async def test_token_is_refused_when_it_is_over_by_more_than_a_clock_may_be_wrong() -> None:
    stage = Stage()
    token = CLUSTER.token(who := await stage.create())
    stage.ahead = HOUR + LEEWAY - 60
    assert await stage.identify(token) == who
    stage.ahead = HOUR + LEEWAY + 60
    assert await stage.identify(token) is None
    stage.ahead = 0.0
    assert await stage.identify(CLUSTER.token(who, exp=None)) is None, "a token that says no end has none to be judged"


async def test_token_of_a_pod_that_stops_is_good_for_its_grace_period_and_an_hour() -> None:
    stage = Stage()
    who = await stage.create()
    token = CLUSTER.token(who, exp=time.time() + 10 * HOUR)
    await stage.client.delete(PODS, "default", "w0", grace_seconds=600)
    assert (await stage.client.get(PODS, "default", "w0")).metadata.deletion_timestamp is not None
    for still_good in (0.0, 540.0, 600 + LEEWAY - 60):
        stage.ahead = still_good
        assert await stage.identify(token) == who, "it saves, and our clock may be ahead"
    stage.ahead = 600 + LEEWAY + 60
    assert await stage.identify(token) is None, "its node is lost, or a finalizer keeps it"


async def test_forged_token_is_refused_and_its_pod_is_not_looked_up() -> None:
    stage = Stage()
    token = FORGER.token(await stage.create())
    assert await stage.identify(token) is None
    stage.reviewer.now += RETRY + 1
    assert await stage.identify(token) is None


async def test_token_waits_for_keys_that_cannot_be_read_and_for_a_key_that_is_new() -> None:
    stage = Stage()
    token = CLUSTER.token(who := await stage.create())
    stage.reviewer.keys = None
    with pytest.raises(KeysUnknown, match="system:service-account-issuer-discovery"):
        await stage.identify(token)
    stage.reviewer.keys = [Authority("older").jwk()]
    stage.reviewer.now += RETRY + 1
    assert await stage.identify(token) is None, "the keys were read for this token, and none is its own"
    stage.reviewer.keys = [CLUSTER.jwk()]
    stage.reviewer.now += RETRY + 1
    assert await stage.identify(token) == who


async def test_key_of_an_unknown_kind_leaves_its_tokens_unjudged() -> None:
    stage = Stage()
    token = CLUSTER.token(await stage.create())
    stage.reviewer.keys = [{"kid": CLUSTER.key_id, "kty": "later"}, Authority("other").jwk()]
    with pytest.raises(KeysUnknown):
        await stage.identify(token)
