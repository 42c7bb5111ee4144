"""The identity cache: which tokens are asked about, how often, how long they are believed, and who waits for whom."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from everstep_operator.endpoint.token_claims import MAX_TOKEN, PodIdentity
from everstep_operator.endpoint.token_reviews import (
    MAX_OF_POD,
    IdentityCache,
    IdentityLimits,
    ReviewLane,
    TokenRefusal,
    TooManyChecks,
    authenticator,
)
from everstep_operator.endpoint.token_signatures import MAX_OF_ID, RETRY
from everstep_operator.kube.client import KubeClient, TokenIdentity
from support.operator.tokens import AUDIENCE, POD, Authority, Reviewer, pod

CLUSTER, FORGER = Authority(), Authority()


@pytest.fixture
def reviewer() -> Reviewer:
    return Reviewer(CLUSTER)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # the cache has no event for it
            await asyncio.sleep(0)


async def refused(cache: IdentityCache, token: str) -> str:
    answer = await cache.identify(token)
    assert isinstance(answer, TokenRefusal)
    return answer.reason


async def outcome(cache: IdentityCache, token: str) -> str:
    try:
        answer = await cache.identify(token)
    except TooManyChecks:
        return "later"
    return "refused" if isinstance(answer, TokenRefusal) else "good"


# --- answers and how long they hold


async def test_answer_is_kept_for_its_time_and_then_asked_again(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), reviewer.issue()
    assert [await cache.identify(token) for _ in range(3)] == [POD] * 3
    assert reviewer.checked == [token]
    reviewer.valid.clear()  # the pod is deleted
    reviewer.now += 15
    await refused(cache, token)


async def test_answer_that_grows_old_is_checked_again_and_nobody_waits_for_it(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), reviewer.issue()
    await cache.identify(token)
    reviewer.now += 11
    reviewer.gate = asyncio.Event()
    assert [await cache.identify(token) for _ in range(3)] == [POD] * 3  # while the review hangs
    await until(lambda: len(reviewer.checked) == 2)
    reviewer.gate.set()
    await until(lambda: not cache.checks)
    reviewer.now += 11
    assert await cache.identify(token) == POD


async def test_deleted_pod_is_not_believed_longer_when_its_check_fails_in_between(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), reviewer.issue()
    await cache.identify(token)
    reviewer.now += 11
    reviewer.broken = ConnectionError("API server away")
    assert await cache.identify(token) == POD
    await until(lambda: not cache.checks)
    reviewer.now += 4
    with pytest.raises(ConnectionError):
        await cache.identify(token)


async def test_refusal_is_kept_shorter(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), CLUSTER.token()
    await refused(cache, token)
    reviewer.valid[token] = POD
    await refused(cache, token)
    reviewer.now += 2
    assert await cache.identify(token) == POD


async def test_concurrent_reports_share_one_check(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), reviewer.issue()
    assert await asyncio.gather(*(cache.identify(token) for _ in range(50))) == [POD] * 50
    assert reviewer.checked == [token]


async def test_caller_that_gives_up_does_not_take_the_check_from_others(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), reviewer.issue()
    first = asyncio.create_task(cache.identify(token))
    second = asyncio.create_task(cache.identify(token))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == POD


async def test_failed_check_is_raised_and_not_kept(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), reviewer.issue()
    reviewer.broken = ConnectionError("API server away")
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await cache.identify(token)
    assert reviewer.checked == [token, token]


async def test_review_that_names_another_pod_than_the_token_is_not_believed(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), CLUSTER.token(POD)
    reviewer.valid[token] = pod(7)
    await refused(cache, token)


async def test_forget_asks_again_and_the_token_is_nowhere_in_memory(reviewer: Reviewer) -> None:
    cache, token = reviewer.cache(), reviewer.issue()
    await cache.identify(token)
    assert token not in repr({name: getattr(cache, name) for name in vars(cache)})
    cache.forget()
    await cache.identify(token)
    assert reviewer.checked == [token, token]


# --- what costs no request


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("", "no service account's token"),
        ("x" * (MAX_TOKEN + 1), "no service account's token"),
        ("a.b", "no service account's token"),
        ("a.b.c.d", "no service account's token"),
        ("..", "no service account's token"),
        ("eyJh.eyJh.eyJh", "bound to a pod"),
        ("ä.ö.ü", "bound to a pod"),
        (CLUSTER.token(aud=["https://kubernetes.default.svc"]), "another audience"),
        (CLUSTER.token(aud="vault"), "another audience"),
        (CLUSTER.token(aud=[str(i) for i in range(100)]), "bound to a pod"),
        (CLUSTER.token(sub="alice"), "subject"),
        (CLUSTER.token(sub="system:serviceaccount:team-b:default"), "subject"),
        (CLUSTER.token(**{"kubernetes.io": {"namespace": "team-a"}}), "bound to a pod"),  # type: ignore[arg-type]
        (CLUSTER.token(**{"kubernetes.io": None}), "bound to a pod"),  # type: ignore[arg-type]
    ],
)
async def test_token_that_cannot_be_a_workers_is_refused_without_a_review(
    reviewer: Reviewer, token: str, reason: str
) -> None:
    cache = reviewer.cache()
    assert reason in await refused(cache, token)
    assert (reviewer.checked, reviewer.key_reads) == ([], 0)


@pytest.mark.parametrize("keys_at_hand", [True, False])
async def test_token_that_is_over_by_our_clock_is_judged_by_the_api_server(
    reviewer: Reviewer, keys_at_hand: bool
) -> None:
    """As where the operator's node is 70 minutes ahead, or the kubelet's behind."""
    if not keys_at_hand:
        reviewer.keys = None
    cache = await reviewer.cache_with_keys()
    now = time.time()
    tokens = [CLUSTER.token(exp=now - 600), CLUSTER.token(exp=now - 86_400), CLUSTER.token(nbf=now + 4200)]
    reviewer.valid = dict.fromkeys(tokens, POD)
    assert [await cache.identify(token) for token in tokens] == [POD] * 3
    reviewer.valid.clear()
    reviewer.now += 15
    assert "expired" in await refused(cache, tokens[0])


async def test_made_up_tokens_that_are_over_cost_no_review(reviewer: Reviewer) -> None:
    cache = await reviewer.cache_with_keys()
    for i in range(100):
        await refused(cache, FORGER.token(pod(i), exp=1.0))
    assert reviewer.checked == []


async def test_forged_tokens_cost_no_review_once_the_keys_are_at_hand(reviewer: Reviewer) -> None:
    cache = await reviewer.cache_with_keys()
    head, body, signature = CLUSTER.token(POD).split(".")
    forged = [FORGER.token(pod(i)) for i in range(200)]
    forged += [f"{head}.{FORGER.token(pod(9)).split('.')[1]}.{signature}", f"{head}.{body}.", f"{head}.{body}.é"]
    forged += [f"{head}.{body}.{signature[:-8]}AAAAAAAA", f"{head}.{body}.A"]
    for token in forged:
        await refused(cache, token)
    assert reviewer.checked == []
    assert await cache.identify(reviewer.issue()) == POD


async def test_key_set_cannot_bring_in_a_key_that_anybody_has(reviewer: Reviewer) -> None:
    reviewer.keys = [{"kty": "oct", "k": "c2VjcmV0", "kid": "k1", "alg": "HS256"}, {"kty": "odd"}, {}]
    cache = await reviewer.cache_with_keys()
    await refused(cache, CLUSTER.token(POD))
    assert len(reviewer.checked) == 1  # nothing is decided by such a key


async def test_token_of_a_key_that_is_new_is_reviewed_and_the_keys_are_read_again(reviewer: Reviewer) -> None:
    cache = await reviewer.cache_with_keys()
    newer = Authority("k2")
    reviewer.keys = [CLUSTER.jwk(), newer.jwk()]
    token = newer.token(POD)
    reviewer.valid[token] = POD
    assert await cache.identify(token) == POD
    await cache._keys.ready()
    reviewer.checked.clear()
    forged = Authority("k2").token(pod(1))
    assert "not signed" in await refused(cache, forged)
    assert reviewer.checked == []


async def test_keys_without_an_id_or_with_one_id_are_all_tried(reviewer: Reviewer) -> None:
    for key_id in ("", "k1"):
        keys = [Authority(key_id) for _ in range(MAX_OF_ID)]
        reviewer.keys = [key.jwk() for key in keys]
        cache = reviewer.cache()
        await outcome(cache, keys[0].token(pod(0)))
        await cache._keys.ready()
        reviewer.checked.clear()
        for number, key in enumerate(keys):
            token = key.token(pod(number), jti="2")
            reviewer.valid[token] = pod(number)
            assert await cache.identify(token) == pod(number)
        assert len(reviewer.checked) == MAX_OF_ID
        await refused(cache, Authority(key_id).token(pod(9)))
        assert len(reviewer.checked) == MAX_OF_ID


@pytest.mark.parametrize("key_id", ["", "k1"])
@pytest.mark.parametrize("also", ["too many", "of an unknown kind"])
async def test_key_that_cannot_be_tried_makes_no_token_of_its_id_a_forged_one(
    reviewer: Reviewer, key_id: str, also: str
) -> None:
    keys = [Authority(key_id) for _ in range(MAX_OF_ID if also == "too many" else 1)]
    last = Authority(key_id)
    row = last.jwk() if also == "too many" else {**last.jwk(), "kty": "AKP", "alg": "ML-DSA-65"}
    reviewer.keys = [*(key.jwk() for key in keys), row]
    cache = await reviewer.cache_with_keys()
    token = last.token(POD)
    reviewer.valid[token] = POD
    assert await cache.identify(token) == POD


async def test_new_key_under_the_id_of_the_old_one_refuses_no_token(reviewer: Reviewer) -> None:
    """As an external signer may change it."""
    cache = await reviewer.cache_with_keys()
    newer = Authority("k1")
    reviewer.keys = [newer.jwk()]
    tokens = [newer.token(pod(i)) for i in range(20)]
    reviewer.valid |= {token: pod(i) for i, token in enumerate(tokens)}
    before = reviewer.key_reads
    answers = await asyncio.gather(*(cache.identify(token) for token in [*tokens, *tokens]))
    assert answers == [pod(i) for i in range(20)] * 2
    assert sorted(reviewer.checked) == sorted(tokens)  # one check of each
    assert reviewer.key_reads - before == 1


async def test_bad_signatures_have_the_keys_read_once_in_a_while_and_cost_no_review(reviewer: Reviewer) -> None:
    cache = await reviewer.cache_with_keys()
    before = reviewer.key_reads
    for round_ in range(3):
        answers = await asyncio.gather(*(outcome(cache, FORGER.token(pod(i), jti=f"{round_}")) for i in range(50)))
        assert answers == ["refused"] * 50
        reviewer.now += RETRY / 2
        assert await outcome(cache, FORGER.token(POD, jti=f"{round_}")) == "refused"
        assert reviewer.key_reads - before == round_ + 1
        reviewer.now += RETRY / 2
    assert reviewer.checked == []


async def test_old_keys_that_cannot_be_read_again_refuse_nothing(reviewer: Reviewer) -> None:
    cache = await reviewer.cache_with_keys()
    reviewer.keys = None
    newer = Authority("k1")
    tokens = [newer.token(POD), newer.token(POD, jti="2")]
    reviewer.valid = dict.fromkeys(tokens, POD)
    assert [await cache.identify(token) for token in tokens] == [POD] * 2
    assert await cache.identify(reviewer.issue(pod(3))) == pod(3)


async def test_unknown_keys_make_nobody_read_the_keys_all_the_time(reviewer: Reviewer) -> None:
    cache = await reviewer.cache_with_keys()
    before = reviewer.key_reads
    for i in range(50):
        await outcome(cache, Authority(f"made-up-{i}").token(pod(i)))
        await cache._keys.ready()
    assert reviewer.key_reads - before == 1


async def test_keys_that_may_not_be_read_are_said_once_with_what_to_do(
    reviewer: Reviewer, caplog: pytest.LogCaptureFixture
) -> None:
    reviewer.keys = None
    cache = reviewer.cache()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await cache.identify(reviewer.issue()) == POD
            await cache._keys.ready()
            reviewer.now += 1000
    told = [record.reason for record in caplog.records if record.name == "everstep.signatures"]  # type: ignore[attr-defined]
    assert len(told) == 1
    assert "system:service-account-issuer-discovery" in told[0]


# --- what a review confirms


class Confirms:
    """An API server that confirms every token, for these audiences."""

    def __init__(self, *audiences: str) -> None:
        self._identity = TokenIdentity("system:serviceaccount:team-a:default", audiences, POD.pod_name, POD.pod_uid)

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenIdentity:
        return self._identity


@pytest.mark.parametrize(
    ("audiences", "known"),
    [
        ((AUDIENCE,), POD),
        (("other", AUDIENCE), POD),
        ((), None),  # a server that does not know audiences
        (("https://kubernetes.default.svc",), None),
    ],
)
async def test_review_counts_only_for_our_audience(audiences: tuple[str, ...], known: PodIdentity | None) -> None:
    assert await authenticator(cast(KubeClient, Confirms(*audiences)))("any") == known


# --- who waits for whom


async def test_tokens_that_are_made_up_delay_no_token_that_was_good(reviewer: Reviewer) -> None:
    reviewer.keys = None  # nothing is known of signatures
    cache, token = reviewer.cache(), reviewer.issue()
    await cache.identify(token)
    reviewer.now += 15
    gates = {True: None, False: asyncio.Event()}

    async def review(asked: str) -> PodIdentity | None:  # made-up ones take the API server for ever
        gate = gates[asked == token]
        if gate is not None:
            await gate.wait()
        return reviewer.valid.get(asked)

    cache._authenticate = review
    flood = [asyncio.create_task(outcome(cache, FORGER.token(pod(i, f"ns-{i}")))) for i in range(3000)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert await cache.identify(token) == POD
    assert cache.checks <= 64
    gates[False].set()  # type: ignore[union-attr]
    assert set(await asyncio.gather(*flood)) == {"later", "refused"}


async def test_made_up_tokens_delay_no_pod_that_exists(reviewer: Reviewer) -> None:
    reviewer.keys = None
    cache, token = reviewer.cache(exists=lambda who: who == POD), reviewer.issue()
    real = reviewer.review
    hang = asyncio.Event()

    async def review(asked: str) -> PodIdentity | None:
        if asked != token:
            await hang.wait()
        return await real(asked)

    cache._authenticate = review
    flood = [asyncio.create_task(outcome(cache, FORGER.token(pod(i, f"ns-{i}")))) for i in range(500)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert await cache.identify(token) == POD
    hang.set()
    await asyncio.gather(*flood)


async def test_tokens_of_one_namespace_leave_room_for_another(reviewer: Reviewer) -> None:
    """Signed ones: of tenants that have many."""
    cache = await reviewer.cache_with_keys(
        IdentityLimits(waiting=dict.fromkeys(ReviewLane, 64), parallel=dict.fromkeys(ReviewLane, 1))
    )
    reviewer.gate = asyncio.Event()
    many = [asyncio.create_task(outcome(cache, CLUSTER.token(pod(i)))) for i in range(200)]
    await asyncio.sleep(0)
    assert cache.checks == 32
    mine = asyncio.create_task(outcome(cache, reviewer.issue()))
    await asyncio.sleep(0)
    reviewer.gate.set()
    assert await mine == "good"
    assert (await asyncio.gather(*many)).count("later") == 168


async def test_refusals_push_out_no_answer(reviewer: Reviewer) -> None:
    cache = reviewer.cache(IdentityLimits(accepted=100, refused=50))
    good = [reviewer.issue(pod(i)) for i in range(100)]
    for token in good:
        await cache.identify(token)
    for i in range(500):
        await refused(cache, CLUSTER.token(pod(i, "others")))
    reviewer.checked.clear()
    assert [await outcome(cache, token) for token in good] == ["good"] * 100
    assert reviewer.checked == []
    assert len(cache._refused) == 50


async def test_one_pod_with_many_tokens_pushes_out_only_its_own(reviewer: Reviewer) -> None:
    cache = reviewer.cache(IdentityLimits(accepted=50))
    mine = reviewer.issue()
    await cache.identify(mine)
    for i in range(200):
        token = CLUSTER.token(pod(1), jti=str(i))
        reviewer.valid[token] = pod(1)
        await cache.identify(token)
    reviewer.checked.clear()
    assert await cache.identify(mine) == POD
    assert reviewer.checked == []
    assert len(cache._good) == MAX_OF_POD + 1
    reviewer.now += 1000
    cache.forget()
    assert not cache._tokens_of


async def test_many_tokens_are_checked_a_few_at_a_time_and_few_are_kept(reviewer: Reviewer) -> None:
    cache = await reviewer.cache_with_keys(IdentityLimits(accepted=10, parallel=dict.fromkeys(ReviewLane, 4)))
    tokens = [reviewer.issue(pod(i, f"ns-{i}")) for i in range(40)]
    await asyncio.gather(*(cache.identify(token) for token in tokens))
    assert reviewer.most_parallel == 4
    asked = len(reviewer.checked)
    await asyncio.gather(*(cache.identify(token) for token in tokens))
    assert len(reviewer.checked) - asked == 30
