"""Whose token it is: the check by which the operator knows its workers."""

from __future__ import annotations

import pytest

from everstep_operator.endpoint.token_claims import ClaimsRefused, PodIdentity, read_claims
from everstep_operator.endpoint.token_signatures import Proof, SigningKeys
from everstep_operator.kube.client import TokenIdentity, TokenRefused
from everstep_operator.kube.resources import PODS
from support.conformity.bodies import pod
from support.conformity.world import World

AUDIENCE = "everstep.dev/operator"


async def test_token_names_its_pod_for_its_audience(world: World) -> None:
    made = await world.client.create(PODS, world.namespace, pod("w"))
    token = world.token("w", made.metadata.uid, AUDIENCE)
    identity = await world.client.review_token(token, ["another", AUDIENCE])
    assert isinstance(identity, TokenIdentity)
    assert identity.username == f"system:serviceaccount:{world.namespace}:default"
    assert (identity.namespace, identity.pod_name, identity.pod_uid) == (world.namespace, "w", made.metadata.uid)
    assert identity.audiences == (AUDIENCE,)


async def test_token_is_refused_for_another_audience(world: World) -> None:
    made = await world.client.create(PODS, world.namespace, pod("w"))
    token = world.token("w", made.metadata.uid, AUDIENCE)
    assert isinstance(await world.client.review_token(token, ["another"]), TokenRefused)


async def test_what_is_no_token_is_refused_and_not_quoted(world: World) -> None:
    for text in ("no.such.token", "x", "a.b", "ä.ö"):
        review = await world.client.review_token(text, [AUDIENCE])
        assert isinstance(review, TokenRefused)
        assert "such" not in review.reason


async def test_token_says_whose_it_is_and_the_clusters_keys_prove_it(world: World) -> None:
    made = await world.client.create(PODS, world.namespace, pod("w"))
    token = world.token("w", made.metadata.uid, AUDIENCE)
    claims = read_claims(token, AUDIENCE)
    assert claims.pod == PodIdentity(world.namespace, "w", made.metadata.uid)
    keys = SigningKeys(world.client.signing_keys, monotonic=lambda: 0.0)
    assert await keys.prove(token, claims) is Proof.UNKNOWN
    await keys.ready()
    assert await keys.prove(token, claims) is Proof.SIGNED
    head, body, signature = token.split(".")
    other = signature[:10] + ("A" if signature[10] != "A" else "B") + signature[11:]
    assert await keys.prove(f"{head}.{body}.{other}", claims) is Proof.FORGED


async def test_token_that_is_bound_to_no_pod_is_told_by_itself(world: World) -> None:
    with pytest.raises(ClaimsRefused, match="bound to a pod"):
        read_claims(world.token("", "", AUDIENCE), AUDIENCE)


async def test_token_dies_with_its_pod(world: World) -> None:
    made = await world.client.create(PODS, world.namespace, pod("w"))
    token = world.token("w", made.metadata.uid, AUDIENCE)
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=0)
    await world.client.create(PODS, world.namespace, pod("w"))

    async def refused() -> bool:
        return isinstance(await world.client.review_token(token, [AUDIENCE]), TokenRefused)

    await world.eventually("the token died with its pod", refused)
