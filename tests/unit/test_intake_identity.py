"""The identity cache: how often a token is checked, for how long it is believed, and what is kept of it."""

import asyncio

import pytest

from everstep_operator.shell.identity import MAX_TOKEN, IdentityCache, PodIdentity

POD = PodIdentity("team-a", "digits-w0-0", "uid-1")


class Reviewer:
    """A TokenReview stand-in that counts, and a clock that tests move."""

    def __init__(self) -> None:
        self.valid: dict[str, PodIdentity] = {"good": POD}
        self.checked: list[str] = []
        self.parallel = self.most_parallel = 0
        self.now = 1000.0

    async def __call__(self, token: str) -> PodIdentity | None:
        self.checked.append(token)
        self.parallel += 1
        self.most_parallel = max(self.parallel, self.most_parallel)
        await asyncio.sleep(0.01)
        self.parallel -= 1
        if token == "broken":
            raise ConnectionError("apiserver away")
        return self.valid.get(token)

    def cache(self, **bounds: int) -> IdentityCache:
        return IdentityCache(self, monotonic=lambda: self.now, ttl=15, refused_ttl=2, **bounds)


async def test_answer_is_kept_for_its_time_and_then_asked_again() -> None:
    cache = (reviewer := Reviewer()).cache()
    assert [await cache.identify("good") for _ in range(3)] == [POD] * 3
    assert reviewer.checked == ["good"]
    del reviewer.valid["good"]  # the pod is deleted
    reviewer.now += 15
    assert await cache.identify("good") is None


async def test_refusal_is_kept_shorter() -> None:
    cache = (reviewer := Reviewer()).cache()
    assert await cache.identify("new") is None
    reviewer.valid["new"] = POD
    assert await cache.identify("new") is None
    reviewer.now += 2
    assert await cache.identify("new") == POD


async def test_concurrent_reports_share_one_check() -> None:
    cache = (reviewer := Reviewer()).cache()
    assert await asyncio.gather(*(cache.identify("good") for _ in range(50))) == [POD] * 50
    assert reviewer.checked == ["good"]


async def test_caller_that_gives_up_does_not_take_the_check_from_others() -> None:
    cache = Reviewer().cache()
    first = asyncio.create_task(cache.identify("good"))
    second = asyncio.create_task(cache.identify("good"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == POD


async def test_many_tokens_are_checked_a_few_at_a_time_and_few_are_kept() -> None:
    cache = (reviewer := Reviewer()).cache(max_parallel=4, max_entries=10)
    await asyncio.gather(*(cache.identify(f"t{i}") for i in range(40)))
    assert reviewer.most_parallel == 4
    asked = len(reviewer.checked)
    await asyncio.gather(*(cache.identify(f"t{i}") for i in range(40)))
    assert len(reviewer.checked) - asked == 30


async def test_failed_check_is_raised_and_not_kept() -> None:
    cache = (reviewer := Reviewer()).cache()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await cache.identify("broken")
    assert reviewer.checked == ["broken", "broken"]


@pytest.mark.parametrize("token", ["", "x" * (MAX_TOKEN + 1)])
async def test_impossible_token_is_refused_unchecked(token: str) -> None:
    cache = (reviewer := Reviewer()).cache()
    assert await cache.identify(token) is None
    assert reviewer.checked == []


async def test_forget_asks_again_and_the_token_is_nowhere_in_memory() -> None:
    cache = (reviewer := Reviewer()).cache()
    await cache.identify("good")
    assert "good" not in repr(vars(cache)["_answers"])
    cache.forget()
    await cache.identify("good")
    assert reviewer.checked == ["good", "good"]
